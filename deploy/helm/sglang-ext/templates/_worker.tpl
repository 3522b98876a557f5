{{/*
The pod of one instance, or of one of its nodes: dict root, name, pool, part ("single", "leader" or "member"), prefix.
The controller that makes the nodes of an instance names them to each other in variables that begin with the prefix.
*/}}
{{- define "sglang-ext.worker" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $port := $root.Values.worker.port -}}
{{- $isServing := ne .part "member" -}}
{{- $isPrefill := hasPrefix "prefill" $pool.role -}}
{{- $hasBootstrap := include "sglang-ext.hasBootstrap" $pool -}}
{{- $publishes := include "sglang-ext.publishes" $pool -}}
{{- $hasPoolKey := and $pool.sharesLongPrompts $root.Values.keys.pool -}}
metadata:
  labels:
    {{- include "sglang-ext.selector" $root | nindent 4 }}
    {{- include "sglang-ext.poolLabels" . | nindent 4 }}
    sglang-ext.io/part: {{ .part }}
    {{- with $pool.revision }}
    # Of the pods, not of their Service, which has pods of two revisions while one replaces the other.
    sglang-ext.io/revision: {{ . | quote }}
    {{- end }}
  annotations:
    sglang-ext.io/model: {{ $pool.servedModelName | default $pool.model | quote }}
    {{- with $pool.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  # The delay, what runs, and a margin. SGLang itself sets no limit.
  terminationGracePeriodSeconds: {{ add $pool.drainDelaySecs $pool.shutdownGraceSecs 15 }}
  securityContext:
    {{- include "sglang-ext.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
  {{- with $pool.affinity }}
  affinity: {{ toJson . }}
  {{- end }}
  {{- if eq .part "single" }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      matchLabelKeys: [pod-template-hash]
      labelSelector:
        matchLabels:
          {{- include "sglang-ext.selector" $root | nindent 10 }}
          sglang-ext.io/pool: {{ .name }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "sglang-ext.image" $pool.image }}
      imagePullPolicy: {{ $pool.image.pullPolicy | default "IfNotPresent" }}
      command: [sglang-ext, worker]
      args:
        - --role={{ get (dict "prefill-short" "short" "prefill-long" "long" "prefill" "both" "decode" "decode" "plain" "plain") $pool.role }}
        - --model-path={{ $pool.model }}
        - --host=0.0.0.0
        - --port={{ $port }}
        - --advertise-host=$(POD_IP)
        {{- if ne $pool.role "plain" }}
        - --transfer-backend={{ $pool.transferBackend }}
        {{- end }}
        {{- with $pool.revision }}
        - {{ printf "--revision=%s" . | quote }}
        {{- end }}
        - --device={{ ternary "cuda" "cpu" (gt (int $pool.gpus) 0) }}
        {{- if $hasBootstrap }}
        - --bootstrap-port={{ $root.Values.worker.bootstrapPort }}
        {{- end }}
        {{- if $publishes }}
        - --kv-events-port={{ $root.Values.worker.kvEventsPort }}
        - --kv-events-replay-port={{ $root.Values.worker.kvEventsReplayPort }}
        {{- end }}
        - --load-events-port={{ $root.Values.worker.loadEventsPort }}
        {{- if $isPrefill }}
        - --laps-boundary-tokens={{ int $root.Values.boundaryTokens }}
        {{- end }}
        {{- if $pool.sharesLongPrompts }}
        - --cdsp-coordinator={{ include "sglang-ext.fullname" $root }}-coordinator:{{ $root.Values.coordinator.port }}
        {{- end }}
        {{- if $hasPoolKey }}
        - --cdsp-key-file={{ include "sglang-ext.poolKeyFile" $root }}
        {{- end }}
        {{- range $pool.args }}
        - {{ . | quote }}
        {{- end }}
        - --
        - --tp-size={{ $pool.tp }}
        {{- if gt (int $pool.pp) 1 }}
        - --pp-size={{ $pool.pp }}
        {{- end }}
        {{- if gt (int $pool.dcp) 1 }}
        - --dcp-size={{ $pool.dcp }}
        {{- end }}
        {{- with $pool.servedModelName }}
        - --served-model-name={{ . }}
        {{- end }}
        {{- if ne .part "single" }}
        - --nnodes=$({{ .prefix }}_GROUP_SIZE)
        - --node-rank=$({{ .prefix }}_WORKER_INDEX)
        - --dist-init-addr=$({{ .prefix }}_LEADER_ADDRESS):{{ $root.Values.worker.distributedPort }}
        {{- end }}
        {{- if $root.Values.keys.worker }}
        - --api-key=$(SGLANG_EXT_WORKER_API_KEY)
        {{- end }}
        {{- range $pool.sglangArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        # The root is read-only, and the user has no entry in /etc/passwd.
        - {name: HOME, value: /cache}
        - {name: USER, value: sglang-ext}
        - {name: XDG_CACHE_HOME, value: /cache}
        - {name: HF_HOME, value: /cache/huggingface}
        - {name: TRITON_CACHE_DIR, value: /cache/triton}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/torchinductor}
        - {name: FLASHINFER_WORKSPACE_BASE, value: /cache}
        {{- include "sglang-ext.key" (list "SGLANG_EXT_WORKER_API_KEY" $root.Values.keys.worker $root) | indent 8 }}
        {{- include "sglang-ext.key" (list "HF_TOKEN" $root.Values.keys.huggingFace $root) | indent 8 }}
        {{- range $pool.env }}
        - {{ toJson . }}
        {{- end }}
      {{- if $isServing }}
      ports:
        - {name: http, containerPort: {{ $port }}, protocol: TCP}
        {{- if $hasBootstrap }}
        - {name: bootstrap, containerPort: {{ $root.Values.worker.bootstrapPort }}, protocol: TCP}
        {{- end }}
        {{- if $publishes }}
        - {name: kv-events, containerPort: {{ $root.Values.worker.kvEventsPort }}, protocol: TCP}
        - {name: kv-replay, containerPort: {{ $root.Values.worker.kvEventsReplayPort }}, protocol: TCP}
        {{- end }}
        - {name: load-events, containerPort: {{ $root.Values.worker.loadEventsPort }}, protocol: TCP}
      # While a model loads the port is closed, then 503 until it is warm: /health is 200 once it can serve. It computes
      # a token, but only where nothing else runs.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ div (add $pool.startupSecs 9) 10 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 3
      # /ping computes nothing: the server process answers it.
      livenessProbe:
        {{- if $root.Values.keys.worker }}
        # SGLang asks for its key there.
        exec:
          command:
            - python3
            - -c
            - >-
              import os, urllib.request as u;
              u.urlopen(u.Request("http://127.0.0.1:{{ $port }}/ping",
              headers={"Authorization": "Bearer " + os.environ["SGLANG_EXT_WORKER_API_KEY"]}), timeout=8)
        {{- else }}
        httpGet: {path: /ping, port: http}
        {{- end }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      {{- end }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $pool.drainDelaySecs }}}
      {{- $resources := deepCopy $pool.resources }}
      {{- $limits := deepCopy ($resources.limits | default dict) }}
      {{- $requests := deepCopy $resources.requests }}
      {{- if gt (int $pool.gpus) 0 }}
      {{- $_ := set $limits $pool.gpuResource (int $pool.gpus) }}
      {{- $_ := set $requests $pool.gpuResource (int $pool.gpus) }}
      {{- end }}
      {{- range $name, $count := $pool.extraResources }}
      {{- $_ := set $limits $name $count }}
      {{- $_ := set $requests $name $count }}
      {{- end }}
      {{- $_ := set $resources "requests" $requests }}
      {{- if $limits }}{{ $_ := set $resources "limits" $limits }}{{ end }}
      resources: {{ toJson $resources }}
      securityContext:
        {{- include "sglang-ext.containerSecurity" $pool.addCapabilities | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        {{- if $hasPoolKey }}
        {{- include "sglang-ext.poolKeyMount" $root | nindent 8 }}
        {{- end }}
        {{- range $pool.volumeMounts }}
        - {{ toJson . }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: cache
      emptyDir: {{ if $pool.cacheSize }}{sizeLimit: {{ $pool.cacheSize }}}{{ else }}{}{{ end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory }}}
    {{- if $hasPoolKey }}
    {{- include "sglang-ext.poolKeyVolume" $root | nindent 4 }}
    {{- end }}
    {{- range $pool.volumes }}
    - {{ toJson . }}
    {{- end }}
{{- end -}}

{{/* Whether the instances of a pool publish which KV blocks they hold, where their pages are large enough. */}}
{{- define "sglang-ext.publishes" -}}
{{- if and (ne .role "decode") (not .sharesLongPrompts) }}true{{ end -}}
{{- end -}}

{{/* Whether decode finds the instances of a pool by a port of their own, now or once they have become prefill. */}}
{{- define "sglang-ext.hasBootstrap" -}}
{{- if or (hasPrefix "prefill" .role) (and (eq .role "decode") (has "--enable-pd-role-switch" .sglangArgs)) }}true{{ end -}}
{{- end -}}

{{/* dict root, name, pool */}}
{{- define "sglang-ext.poolLabels" -}}
app.kubernetes.io/component: worker
sglang-ext.io/pool: {{ .name }}
sglang-ext.io/role: {{ .pool.role }}
{{- $boundary := int .root.Values.boundaryTokens }}
{{- if ne .pool.role "plain" }}
llm-d.ai/role: {{ ternary "decode" "prefill" (eq .pool.role "decode") }}
{{- end }}
{{- if .pool.contextLengthRange }}
llm-d.ai/context-length-range: {{ .pool.contextLengthRange | quote }}
{{- else if eq .pool.role "prefill-short" }}
llm-d.ai/context-length-range: "0-{{ $boundary }}"
{{- else if eq .pool.role "prefill-long" }}
llm-d.ai/context-length-range: "{{ add $boundary 1 }}-10000000"
{{- end }}
{{- end -}}
