{{- define "sglang-ext.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name)) -}}
{{- if gt (len $name) 24 }}{{ fail (printf "fullnameOverride: %s is longer than 24 characters, and names of pools and pods come behind it" $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "sglang-ext.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sglang-ext.labels" -}}
{{ include "sglang-ext.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "sglang-ext.image" -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end -}}
{{- end -}}

{{- define "sglang-ext.serviceAccount" -}}
{{- .Values.router.serviceAccount.name | default (ternary (printf "%s-router" (include "sglang-ext.fullname" .)) "default" .Values.router.serviceAccount.create) -}}
{{- end -}}

{{- define "sglang-ext.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "sglang-ext.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* (list name-of-variable entry-of-the-Secret root): nothing without an entry */}}
{{- define "sglang-ext.key" -}}
{{- $entry := index . 1 -}}
{{- if $entry }}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ (index . 2).Values.keys.secret }}
      key: {{ $entry }}
{{- end }}
{{- end -}}

{{/* The pool's key as a file. The root context. */}}
{{- define "sglang-ext.poolKeyFile" -}}/etc/sglang-ext/pool/key{{- end -}}
{{- define "sglang-ext.poolKeyMount" -}}
- {name: pool-key, mountPath: /etc/sglang-ext/pool, readOnly: true}
{{- end -}}
{{- define "sglang-ext.poolKeyVolume" -}}
- name: pool-key
  secret: {secretName: {{ .Values.keys.secret }}, defaultMode: 0440, items: [{key: {{ .Values.keys.pool }}, path: key}]}
{{- end -}}

{{/* Pools as they are: a pool's own keys in the place of those of poolDefaults. {"NAME": {...}} as JSON. */}}
{{- define "sglang-ext.pools" -}}
{{- $pools := dict -}}
{{- $prefilled := dict -}}
{{- $backends := dict -}}
{{- $shared := dict -}}
{{- range $name, $given := .Values.pools -}}
{{- $pool := deepCopy $.Values.poolDefaults -}}
{{- range $key, $value := $given }}{{ $_ := set $pool $key $value }}{{ end -}}
{{- if $pool.enabled -}}
{{- $nodes := int $pool.nodes -}}
{{- $tp := int $pool.tp -}}
{{- $pp := int $pool.pp -}}
{{- if and (gt $pp 1) (has $pool.role (list "decode" "plain")) }}{{ fail (printf "pools.%s: pp %d, and only prefill runs in stages" $name $pp) }}{{ end -}}
{{- if and (gt $pp 1) $pool.sharesLongPrompts }}{{ fail (printf "pools.%s: sharesLongPrompts needs all layers in each instance, and pp is %d" $name $pp) }}{{ end -}}
{{- $dcp := int $pool.dcp -}}
{{- if and (gt $dcp 1) (ne $pool.role "decode") }}{{ fail (printf "pools.%s: dcp %d, and only decode divides KV among ranks" $name $dcp) }}{{ end -}}
{{- if mod $tp $dcp }}{{ fail (printf "pools.%s: tp %d is not a multiple of dcp %d" $name $tp $dcp) }}{{ end -}}
{{- $ranks := mul $tp $pp -}}
{{- if mod $ranks $nodes }}{{ fail (ternary (printf "pools.%s: tp %d is not a multiple of nodes %d" $name $tp $nodes) (printf "pools.%s: tp %d times pp %d is not a multiple of nodes %d" $name $tp $pp $nodes) (eq $pp 1)) }}{{ end -}}
{{- if kindIs "invalid" $pool.gpus }}{{ $_ := set $pool "gpus" (div $ranks $nodes) }}{{ end -}}
{{- if and (gt $dcp 1) (eq (int $pool.gpus) 0) }}{{ fail (printf "pools.%s: dcp %d needs GPUs" $name $dcp) }}{{ end -}}
{{- if and $pool.exclusiveTopology (eq $nodes 1) }}{{ fail (printf "pools.%s: exclusiveTopology is for instances of several nodes" $name) }}{{ end -}}
{{- if kindIs "invalid" $pool.sharesLongPrompts }}{{ $_ := set $pool "sharesLongPrompts" (and $.Values.coordinator.enabled (eq $pool.role "prefill") (eq $pp 1)) }}{{ end -}}
{{- if and $pool.sharesLongPrompts (not $.Values.coordinator.enabled) }}{{ fail (printf "pools.%s: sharesLongPrompts needs coordinator.enabled" $name) }}{{ end -}}
{{- if and $pool.sharesLongPrompts (has $pool.role (list "decode" "plain")) }}{{ fail (printf "pools.%s: sharesLongPrompts is for prefill" $name) }}{{ end -}}
{{- if not (or (int $pool.maxSurge) (int $pool.maxUnavailable)) }}{{ fail (printf "pools.%s: maxSurge and maxUnavailable are both 0" $name) }}{{ end -}}
{{- $served := $pool.servedModelName | default $pool.model -}}
{{- $together := printf "%s%s" $served (ternary (printf " of revision %s" $pool.revision) "" (ne $pool.revision "")) -}}
{{- if ne $pool.role "plain" -}}
{{- $known := get $backends $together | default $pool.transferBackend -}}
{{- if ne $known $pool.transferBackend }}{{ fail (printf "pools.%s: transferBackend %s, but another pool of %s has %s" $name $pool.transferBackend $together $known) }}{{ end -}}
{{- $_ := set $backends $together $pool.transferBackend -}}
{{- end -}}
{{- if ne $pool.role "decode" }}{{ $_ := set $prefilled $together true }}{{ end -}}
{{- if $pool.sharesLongPrompts }}{{ $_ := set $shared $together true }}{{ end -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := $pools -}}
{{- $served := $pool.servedModelName | default $pool.model -}}
{{- $together := printf "%s%s" $served (ternary (printf " of revision %s" $pool.revision) "" (ne $pool.revision "")) -}}
{{- if not (hasKey $prefilled $together) }}{{ fail (printf "pools.%s: no pool prefills for %s" $name $together) }}{{ end -}}
{{- /* Members of a group send the KV that they have computed themselves. */ -}}
{{- if and (hasKey $shared $together) (ne $pool.role "plain") (eq $pool.transferBackend "auto") }}{{ $_ := set $pool "transferBackend" "handshake" }}{{ end -}}
{{- $dcp := int $pool.dcp -}}
{{- if and (gt $dcp 1) (eq $pool.transferBackend "handshake") }}{{ fail (printf "pools.%s: dcp %d does not go with transferBackend handshake, which pools that share long prompts have (coordinator.enabled: false)" $name $dcp) }}{{ end -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{/* "true" where pools share long prompts. The root context. */}}
{{- define "sglang-ext.hasCoordinator" -}}
{{- $shares := false -}}
{{- range fromJson (include "sglang-ext.pools" .) }}{{ if .sharesLongPrompts }}{{ $shares = true }}{{ end }}{{ end -}}
{{- if $shares }}true{{ end -}}
{{- end -}}

{{/* The group of each pool that has one: {"POOL": "GROUP"} as JSON. */}}
{{- define "sglang-ext.grouped" -}}
{{- $full := include "sglang-ext.fullname" . -}}
{{- $pools := fromJson (include "sglang-ext.pools" .) -}}
{{- $grouped := dict -}}
{{- range $group, $about := .Values.groups -}}
{{- $served := "" -}}
{{- range $name := $about.pools -}}
{{- if not (hasKey $pools $name) }}{{ fail (printf "groups.%s: there is no pool %s" $group $name) }}{{ end -}}
{{- if hasKey $grouped $name }}{{ fail (printf "groups.%s: pool %s is in groups.%s, too" $group $name (get $grouped $name)) }}{{ end -}}
{{- $pool := get $pools $name -}}
{{- $model := $pool.servedModelName | default $pool.model -}}
{{- if and $served (ne $served $model) }}{{ fail (printf "groups.%s: pools of %s and of %s; a group is of one model" $group $served $model) }}{{ end -}}
{{- $served = $model -}}
{{- if gt (add (len $full) (len $group) (len $name)) 36 }}{{ fail (printf "groups.%s: the names %s, %s and %s are longer than 36 characters together, and numbers come behind them" $group $full $group $name) }}{{ end -}}
{{- if and (eq $about.kind "RoleBasedGroup") $pool.exclusiveTopology }}{{ fail (printf "groups.%s: exclusiveTopology of pool %s is for a LeaderWorkerSet or a DisaggregatedSet" $group $name) }}{{ end -}}
{{- $_ := set $grouped $name $group -}}
{{- end -}}
{{- if and (eq $about.kind "RoleBasedGroup") (or $about.slices $about.placement) }}{{ fail (printf "groups.%s: slices and placement are for a DisaggregatedSet" $group) }}{{ end -}}
{{- end -}}
{{- toJson $grouped -}}
{{- end -}}

{{- define "sglang-ext.prefillRoles" -}}
[prefill-short, prefill-long, prefill]
{{- end -}}

{{/* All ports except the serving port. */}}
{{- define "sglang-ext.transferPorts" -}}
{{- $port := int .Values.worker.port -}}
- {protocol: TCP, port: 1, endPort: {{ sub $port 1 }}}
- {protocol: TCP, port: {{ add $port 1 }}, endPort: 65535}
{{- end -}}
