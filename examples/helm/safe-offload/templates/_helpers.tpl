{{- define "safe-offload.selector" -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "safe-offload.labels" -}}
{{ include "safe-offload.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "safe-offload.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The MiB of a size such as 320GiB or 16Gi. */}}
{{- define "safe-offload.mib" -}}
{{- $units := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- mul (regexFind "^[0-9]+" .) (get $units (regexFind "[MGT]i" .)) -}}
{{- end -}}

{{/* The MiB of all pools. One that is shared has a table and checksums beside it, at most 1 %. */}}
{{- define "safe-offload.pools" -}}
{{- $pool := include "safe-offload.mib" .Values.cpuBytesToUse -}}
{{- if .Values.share -}}
{{- div (add (mul $pool 101) 99) 100 -}}
{{- else -}}
{{- mul $pool .Values.dataParallelSize -}}
{{- end -}}
{{- end -}}

{{/* The memory limit. 5 % stays free, at least 512 MiB: the engine insists on it. */}}
{{- define "safe-offload.memory" -}}
{{- $taken := add (include "safe-offload.pools" .) (include "safe-offload.mib" .Values.vllmMemory) -}}
{{- $limit := max (div (add (mul $taken 100) 94) 95) (add $taken 512) -}}
{{- div (add $limit (include "safe-offload.mib" .Values.shmSize) 1023) 1024 }}Gi
{{- end -}}

{{/* The size of /dev/shm. */}}
{{- define "safe-offload.shm" -}}
{{- if .Values.share -}}
{{ add (include "safe-offload.mib" .Values.shmSize) (include "safe-offload.pools" .) }}Mi
{{- else -}}
{{ .Values.shmSize }}
{{- end -}}
{{- end -}}

{{/* The tiers as JSON, the nearest first. */}}
{{- define "safe-offload.tiers" -}}
{{- $tiers := list -}}
{{- with .Values.tiers -}}
{{- if .directory.enabled -}}
{{- $tiers = append $tiers (set (deepCopy .directory.settings) "url" (print "file://" .directory.path)) -}}
{{- end -}}
{{- if .valkey.enabled -}}
{{- $valkey := set (deepCopy .valkey.settings) "url" .valkey.url -}}
{{- if .secretName -}}
{{- $_ := set $valkey "password_file" "/etc/kv-cache/password" -}}
{{- if regexMatch "^(rediss|valkeys):" .valkey.url -}}
{{- $_ := set $valkey "ca_file" "/etc/kv-cache/ca.pem" -}}
{{- end -}}
{{- end -}}
{{- $tiers = append $tiers $valkey -}}
{{- end -}}
{{- if .bucket.enabled -}}
{{- $tiers = append $tiers (set (deepCopy .bucket.settings) "url" .bucket.url) -}}
{{- end -}}
{{- if .secretName -}}
{{- range $tiers -}}
{{- if $.Values.tiers.encrypt -}}
{{- $_ := set . "encryption_key_file" "/etc/kv-cache/encryption.keys" -}}
{{- else -}}
{{- $_ := set . "hmac_key_file" "/etc/kv-cache/hmac.key" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $tiers -}}
{{- end -}}

{{/* Arguments of `vllm serve`, which `safe-offload doctor` takes too: of a list of values and tiers as JSON. */}}
{{- define "safe-offload.args" -}}
{{- $values := index . 0 -}}
{{- $tiers := fromJsonArray (index . 1) -}}
{{- $extra := set (deepCopy $values.extraConfig) "cpu_bytes_to_use" $values.cpuBytesToUse -}}
{{- if $values.share -}}
{{- $_ := set $extra "share" "node" -}}
{{- end -}}
{{- if $tiers -}}
{{- $_ := set $extra "tiers" $tiers -}}
{{- end -}}
- {{ $values.model | quote }}
- --tensor-parallel-size={{ $values.tensorParallelSize | default (div $values.gpus $values.dataParallelSize) }}
{{- if gt (int $values.dataParallelSize) 1 }}
- --data-parallel-size={{ $values.dataParallelSize }}
{{- end }}
{{- range $values.args }}
- {{ . | quote }}
{{- end }}
- --shutdown-timeout={{ $values.shutdownTimeout }}
- --kv-transfer-config
- |-
  {{ dict "kv_connector" "SafeCPUOffloadConnector" "kv_connector_extra_config" $extra | toJson }}
{{- end -}}

{{/* What the containers have in common. */}}
{{- define "safe-offload.container" -}}
image: {{ include "safe-offload.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - {name: HOME, value: /home/vllm} # what vLLM compiles is kept below it
  - {name: USER, value: vllm}
  - {name: HF_HOME, value: /models}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .Values.hfToken.secretName }}, key: {{ .Values.hfToken.key }}, optional: true}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.tiers.bucket }}
{{- if and .enabled .credentialsSecretName }}
envFrom:
  - secretRef: {name: {{ .credentialsSecretName }}}
{{- end }}
{{- end }}
# Requests equal limits: the pod is Guaranteed, so it is evicted last.
{{- $resources := dict "cpu" (toString .Values.cpus) "memory" (include "safe-offload.memory" .) .Values.gpuResource (toString .Values.gpus) }}
resources:
  requests: {{ toJson $resources }}
  limits: {{ toJson $resources }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  - {name: models, mountPath: /models}
  - {name: home, mountPath: /home/vllm}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.tiers.directory.enabled }}
  - {name: tier, mountPath: {{ .Values.tiers.directory.path | quote }}}
  {{- end }}
  {{- if .Values.tiers.secretName }}
  - {name: kv-cache, mountPath: /etc/kv-cache, readOnly: true}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Fail for values that do not go together. */}}
{{- define "safe-offload.check" -}}
{{- $tiers := fromJsonArray (include "safe-offload.tiers" .) -}}
{{- with .Values -}}
{{- $written := dict "--kv-transfer-config" "extraConfig" "--kv-offloading-size" "cpuBytesToUse" "--tensor-parallel-size" "tensorParallelSize" "-tp" "tensorParallelSize" "--data-parallel-size" "dataParallelSize" "-dp" "dataParallelSize" "--shutdown-timeout" "shutdownTimeout" "--port" "service.port" -}}
{{- range $arg := .args -}}
{{- /* vLLM reads underscores as dashes, and a flag that is cut short as the only one it can be. */ -}}
{{- $flag := regexFind "^--?[^=.]+" $arg | replace "_" "-" -}}
{{- range $name, $value := $written -}}
{{- if and $flag (hasPrefix $flag $name) -}}
{{- fail (printf "args has %s, which the chart writes: set %s instead" $arg $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key := list "cpu_bytes_to_use" "cpu_bytes_to_use_per_rank" "num_cpu_blocks" "share" "tiers" -}}
{{- if hasKey $.Values.extraConfig $key -}}
{{- fail (printf "extraConfig has %s, which the chart writes: use cpuBytesToUse, share or tiers" $key) -}}
{{- end -}}
{{- end -}}
{{- if and .share $tiers -}}
{{- fail "share and tiers do not go together: write share: \"\", or disable the tiers" -}}
{{- end -}}
{{- if mod .gpus .dataParallelSize -}}
{{- fail (printf "gpus is %v, which %v engines cannot divide: write a multiple of dataParallelSize" .gpus .dataParallelSize) -}}
{{- end -}}
{{- if and .tiers.directory.enabled (not .tiers.directory.volume) -}}
{{- fail "tiers.directory has no volume: write one, such as hostPath: {path: /mnt/nvme/kv, type: Directory}" -}}
{{- end -}}
{{- $least := add .preStopSeconds .shutdownTimeout 120 -}}
{{- if lt (int64 .terminationGracePeriodSeconds) $least -}}
{{- fail (printf "terminationGracePeriodSeconds is %v: write at least %d, which is preStopSeconds, shutdownTimeout and 120 to unlock the pool" .terminationGracePeriodSeconds $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}
