#!/usr/bin/env bash
# Two long prompts back to back in a KV pool that one of them fills by 62 %, then the first one again.
#
# The second prompt needs blocks that the first one has just given back, which has ended or hung engines with other
# offloading connectors. Here both are answered, and when the first prompt returns, what the pool has lost of it comes
# from host memory. Exits with 0 only if all three answers are 200, the returning prompt was a host hit, and its text
# is what it was the first time.
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
set -euo pipefail
export LC_ALL=C

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-}
PROMPT_TOKENS=${PROMPT_TOKENS:-$([[ $MODEL ]] && echo 90000 || echo 16000)}
ANSWER_TOKENS=${ANSWER_TOKENS:-48}
START_TIMEOUT=${START_TIMEOUT:-$([[ $MODEL ]] && echo 3600 || echo 300)}
read -r -a vllm_args <<<"${VLLM_ARGS:-}"

work=$(mktemp -d "${TMPDIR:-/tmp}/back-to-back.XXXXXX")
SERVER_LOG=${SERVER_LOG:-$work/server.log}
server_pid=

say() { printf '%s\n' "$*"; }

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

stop_server() {
    [[ $server_pid ]] || return 0
    kill -TERM "$server_pid" 2>/dev/null || true
    for _ in {1..120}; do
        kill -0 "$server_pid" 2>/dev/null || break
        sleep 0.5
    done
    # The server leads a process group of its own: what it left behind goes too.
    kill -KILL -- "-$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
    server_pid=
}

finish() {
    local status=$?
    trap - EXIT INT TERM
    stop_server
    if ((status == 0)); then
        rm -rf "$work"
    elif [[ -s $SERVER_LOG ]]; then
        printf '\nThe end of the server log, %s:\n' "$SERVER_LOG" >&2
        tail -n 40 "$SERVER_LOG" >&2
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

prepare_tiny_model() { # sets MODEL and adds to vllm_args
    local max_model_len=$((PROMPT_TOKENS + ANSWER_TOKENS)) num_blocks
    num_blocks=$("$PYTHON" - "$work/tiny-gemma3" "$max_model_len" <<'PYTHON'
import sys
from pathlib import Path
from safe_offload.bench.tiny_models import count_prompt_blocks, write_tiny_model

folder, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
write_tiny_model("gemma3", folder)
blocks = count_prompt_blocks("gemma3", num_tokens, block_size=32, max_num_batched_tokens=2048)
print(round(blocks / 0.62))
PYTHON
    ) || fail "cannot make the tiny model; is safe-offload installed for $PYTHON? (make venv)"
    MODEL=$work/tiny-gemma3
    vllm_args=(--dtype float32 --enforce-eager --block-size 32 --max-num-batched-tokens 2048
        --max-model-len "$max_model_len" --num-gpu-blocks-override "$num_blocks" "${vllm_args[@]}")
    export HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
}

start_server() {
    local port serve
    port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    url=http://127.0.0.1:$port
    # The `vllm` command needs a distribution of that name, which vLLM's CPU build is not.
    if "$PYTHON" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
        serve=("$PYTHON" -m vllm.entrypoints.cli.main serve "$MODEL")
    else
        serve=("$PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL")
    fi
    serve+=(--kv-transfer-config '{"kv_connector":"SafeCPUOffloadConnector"}'
        --enable-chunked-prefill --enable-prefix-caching --no-disable-hybrid-kv-cache-manager
        --host 127.0.0.1 --port "$port" "${vllm_args[@]}")
    say "starting: ${serve[*]@Q}"
    VLLM_NO_USAGE_STATS=1 setsid "${serve[@]}" >"$SERVER_LOG" 2>&1 </dev/null &
    server_pid=$!
    local start=$SECONDS
    until curl -sf -o /dev/null "$url/health"; do
        kill -0 "$server_pid" 2>/dev/null || fail "the server ended while it started"
        ((SECONDS - start < START_TIMEOUT)) || fail "the server did not start within $START_TIMEOUT s"
        sleep 0.5
    done
    say "the server is up after $((SECONDS - start)) s"
}

pool_tokens() { # what the KV pool holds, by the server's own figure
    sed -nE 's/.*KV cache size: ([0-9,]+) tokens.*/\1/p' "$SERVER_LOG" | head -n 1 | tr -d ,
}

prompt_tokens_from() { # SOURCE: vLLM's counter of prompt tokens by where they came from
    curl -sf "$url/metrics" | awk -v source="source=\"$1\"" \
        '/^vllm:prompt_tokens_by_source_total/ && index($0, source) {sum += $NF} END {printf "%d\n", sum}'
}

read_counters() { # sets on_gpu, on_host, computed
    on_gpu=$(prompt_tokens_from local_cache_hit)
    on_host=$(prompt_tokens_from external_kv_transfer)
    computed=$(prompt_tokens_from local_compute)
}

# NAME BODY: sends one request and prints its line of the table. Sets status, first_token_us, and by where the prompt's
# tokens came from: on_gpu, on_host, computed. The stream is kept in $work/NAME.stream.
ask() {
    local name=$1 body=$2 line start first=
    read_counters
    local gpu_before=$on_gpu host_before=$on_host computed_before=$computed
    start=${EPOCHREALTIME/./}
    while IFS= read -r line; do
        # The first chunk names the role and has no text yet.
        if [[ ! $first && $line =~ \"(content|reasoning|reasoning_content)\":\"[^\"] ]]; then
            first=${EPOCHREALTIME/./}
        fi
        printf '%s\n' "$line"
    done < <(curl -sN -w '\nHTTP %{http_code}\n' -H 'Content-Type: application/json' -d "@$body" \
        "$url/v1/chat/completions") >"$work/$name.stream"
    status=$(sed -n 's/^HTTP //p' "$work/$name.stream" | tail -n 1)
    first_token_us=$((${first:-$start} - start))
    for _ in {1..50}; do # the counters follow the answer
        read_counters
        ((computed > computed_before)) && break
        sleep 0.1
    done
    on_gpu=$((on_gpu - gpu_before)) on_host=$((on_host - host_before)) computed=$((computed - computed_before))
    printf '%-10s %13d %6s %13s s %9d %9d %11d\n' "$name" $((on_gpu + on_host + computed)) "$status" \
        "$(seconds "$first_token_us")" "$on_gpu" "$on_host" "$computed"
    [[ $status == 200 && $first ]] || {
        head -c 2000 "$work/$name.stream" >&2
        fail "$name was answered with HTTP status $status${first:+ }${first:- and no token}"
    }
}

seconds() { printf '%d.%03d' $(($1 / 1000000)) $(($1 / 1000 % 1000)); }

text_of() { # NAME: the answer, joined from its stream
    "$PYTHON" - "$work/$1.stream" <<'PYTHON'
import json, sys

for line in open(sys.argv[1], encoding="utf-8"):
    if line.startswith("data: {"):
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            print(delta.get("reasoning") or delta.get("reasoning_content") or delta.get("content") or "", end="")
PYTHON
}

((BASH_VERSINFO[0] >= 5)) || fail "needs bash 5 or later, for EPOCHREALTIME; this is $BASH_VERSION"
for command in curl awk sed setsid "$PYTHON"; do
    command -v "$command" >/dev/null || fail "needs $command, which is not on the PATH"
done

[[ $MODEL ]] || prepare_tiny_model
start_server
for seed in 0 1; do
    "$PYTHON" "$(dirname "${BASH_SOURCE[0]}")/chat_request.py" "$url" "$PROMPT_TOKENS" "$ANSWER_TOKENS" "$seed" >"$work/S$seed.json" ||
        fail "cannot make a prompt of $PROMPT_TOKENS tokens"
done

pool=$(pool_tokens)
say "KV pool: ${pool:-unknown} tokens; one prompt of $PROMPT_TOKENS fills $((100 * PROMPT_TOKENS / ${pool:-1})) %"
say
printf '%-10s %13s %6s %15s %9s %9s %11s\n' request 'prompt tokens' HTTP 'first token' 'on GPU' 'on host' recomputed
ask S0 "$work/S0.json"
first_us=$first_token_us
ask S1 "$work/S1.json"
ask S0-again "$work/S0.json"
say

# What may be computed again: the last block, which is never complete, or an odd block of a hybrid model.
((on_host > 0)) ||
    fail "S0 found nothing in host memory. If it found all on the GPU, the pool is too large for this test:" \
        "add --num-gpu-blocks-override to VLLM_ARGS"
((computed * 20 < PROMPT_TOKENS)) || fail "S0 was recomputed when it came back: $computed of $PROMPT_TOKENS tokens"
[[ $(text_of S0) == "$(text_of S0-again)" ]] ||
    fail "S0's answer changed: first $(text_of S0), then $(text_of S0-again)"
kill -0 "$server_pid" 2>/dev/null || fail "the server has ended"

say "answer, both times: $(text_of S0)"
say "OK: both long requests were answered, and S0 came back from host memory with the same text," \
    "$((first_us / (first_token_us + 1))) times sooner"
