#!/usr/bin/env bash
# Two long prompts back to back in a KV pool that one of them fills by 62 %, then the first one again.
#
# The second prompt needs blocks that the first one has just freed, which has crashed or hung engines with other
# offloading connectors. Here both are answered, and the repeat of the first loads its evicted blocks from host memory.
# Exits with 0 only if all three responses are 200, the repeat was a host hit, and its text is unchanged.
#
#   examples/long_context_back_to_back.sh          a tiny hybrid model made on the spot, on the CPU, about a minute
#
#   MODEL=google/gemma-3-27b-it PROMPT_TOKENS=90000 VLLM_ARGS='--tensor-parallel-size 2' \
#       examples/long_context_back_to_back.sh      a real model on real GPUs
#
# MODEL          what vLLM takes as a model; empty: the tiny one
# PROMPT_TOKENS  length of a prompt (16000; with MODEL: 90000)
# ANSWER_TOKENS  length of an answer (48)
# VLLM_ARGS      more arguments for the server, split at white space
# PYTHON         the interpreter that has vLLM and safe-offload (python3)
# SERVER_LOG     where the server's log goes (a file in a temporary folder, which is kept on failure)
# START_TIMEOUT  seconds that the server may take to start (300; with MODEL: 3600)
# STOP_TIMEOUT   seconds that it may take to end before it is killed (5)
# TMPDIR         where a folder for all of this is made, and removed at the end (/tmp)
set -euo pipefail
export LC_ALL=C
# shellcheck source=examples/servers.sh
source "$(dirname "${BASH_SOURCE[0]}")/servers.sh"

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-}
PROMPT_TOKENS=${PROMPT_TOKENS:-$([[ $MODEL ]] && echo 90000 || echo 16000)}
ANSWER_TOKENS=${ANSWER_TOKENS:-48}
START_TIMEOUT=${START_TIMEOUT:-$([[ $MODEL ]] && echo 3600 || echo 300)}
read -r -a vllm_args <<<"${VLLM_ARGS:-}"

server=server
[[ ${SERVER_LOG:-} ]] && logs[$server]=$SERVER_LOG
begin back-to-back

max_model_len=$((PROMPT_TOKENS + ANSWER_TOKENS))
if [[ ! $MODEL ]]; then
    num_blocks=$(make_tiny_model "$max_model_len" 32)
    MODEL=$work/tiny-gemma3
    vllm_args=(--dtype float32 --enforce-eager --block-size 32 --max-num-batched-tokens 2048
        --max-model-len "$max_model_len" --num-gpu-blocks-override $((num_blocks * 100 / 62)) "${vllm_args[@]}")
    export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
fi
start_vllm $server "$MODEL" '{"kv_connector":"SafeCPUOffloadConnector"}' \
    --enable-chunked-prefill --enable-prefix-caching --no-disable-hybrid-kv-cache-manager "${vllm_args[@]}"
await_vllm $server
for seed in 0 1; do
    make_request $server "$PROMPT_TOKENS" $seed >"$work/S$seed.json"
done

ask_and_show() { # NAME BODY
    ask $server "$work/$2.json" "$1"
    printf '%-10s %13d %6s %13s s %9d %9d %11d\n' "$1" $((on_gpu + on_host + computed)) "$status" \
        "$(seconds "$first_token_us")" "$on_gpu" "$on_host" "$computed"
    require_answer "$1"
}

# What the KV pool holds, by the server's own figure.
pool=$(sed -nE 's/.*KV cache size: ([0-9,]+) tokens.*/\1/p' "${logs[$server]}" | head -n 1 | tr -d ,)
say "KV pool: ${pool:-unknown} tokens; one prompt of $PROMPT_TOKENS fills $((100 * PROMPT_TOKENS / ${pool:-1})) %"
say
printf '%-10s %13s %6s %15s %9s %9s %11s\n' request 'prompt tokens' HTTP 'first token' 'on GPU' 'on host' recomputed
ask_and_show S0 S0 # the first steps of a server take longer than those of S1
ask_and_show S1 S1
computed_us=$first_token_us
ask_and_show S0-again S0
say

# What may be computed again: the last block, which is never complete, or an odd block of a hybrid model.
((on_host > 0)) ||
    fail "no host hit for S0. If it was a GPU hit, the KV pool is too large for this test:" \
        "add --num-gpu-blocks-override to VLLM_ARGS"
((computed * 20 < PROMPT_TOKENS)) || fail "the repeat of S0 was recomputed: $computed of $PROMPT_TOKENS tokens"
[[ $(text_of S0) == "$(text_of S0-again)" ]] ||
    fail "S0's answer changed: first $(text_of S0), then $(text_of S0-again)"
is_running $server || fail "the server has ended"

say "answer, both times: $(text_of S0)"
say "OK: both long prompts were answered, and the repeat of S0 hit host memory: same text," \
    "first token $((computed_us / (first_token_us + 1)))x faster than of S1, which was computed"
