# Unpacks what `make gpu-pack` made, all archives at once, and compiles it. usage: . unpack.sh FOLDER
# Sourced, it leaves the variables that a campaign needs, in the folder of the checkout.
packed=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1/vllm" "$1/site" "$1/project"
target=$(cd "$1" && pwd)
unpack() {
    "${PYTHON:-python3}" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \
        "$packed/$1.tar.xz" "$target/$2"
}
unpack vllm vllm & unpack libs vllm & unpack site site & unpack project project & wait
[ ! -e "$packed/cache.tar.xz" ] || unpack cache cache
"${PYTHON:-python3}" -m compileall -q -j 0 "$target" >/dev/null
# Without the last, vLLM imports flashinfer as it makes the sampler.
export PYTHONPATH="$target/site:$target/vllm" VLLM_CACHE_ROOT="$target/cache" HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
cd "$target/project"
