{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.envoyLabels" -}}
app.kubernetes.io/name: tandem-envoy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.redisLabels" -}}
app.kubernetes.io/name: tandem-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The URL of Redis; empty if there is none. */}}
{{- define "tandem.redis" -}}
{{- if .Values.redis.enabled }}redis://{{ .Release.Name }}-redis.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:6379
{{- else }}{{ .Values.redis.url }}{{ end }}
{{- end }}

{{/* How many engines of each role there are. */}}
{{- define "tandem.engineRoles" -}}
{{- with .Values.engines }}
{{- if and .prefill .decode }}{{ dict "prefill" .prefill "decode" .decode | toJson }}
{{- else if or .prefill .decode }}{{ fail "engines.prefill and engines.decode: set both, or neither for equal engines" }}
{{- else }}{{ dict "both" .replicas | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.engineLabels" -}}
app.kubernetes.io/name: tandem-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* What the pool of the engines is: members of config.pools[0]. */}}
{{- define "tandem.enginePool" -}}
kvTransfer: nixl
roles: {{ ternary "auto" "fixed" (hasKey (include "tandem.engineRoles" . | fromJson) "both") }}
nixl: {lease: {{ .Values.engines.lease }}s, declineExpired: true}
discovery:
  kubernetes: {selector: "app.kubernetes.io/name=tandem-engine,app.kubernetes.io/instance={{ .Release.Name }}", ports: [8000]}
{{- end }}

{{/*
vLLM's --kv-transfer-config of a role: an engine that prefills keeps KV for the lease, and one that decodes declines KV
whose lease has ended and computes the prompt (docs/security.md, Wrong text).
*/}}
{{- define "tandem.kvTransfer" -}}
{{- $config := dict "kv_connector" "NixlConnector" "kv_role" (get (dict "prefill" "kv_producer" "decode" "kv_consumer" "both" "kv_both") .role) }}
{{- $extra := dict }}
{{- if ne .role "decode" }}{{ $_ := set $extra "kv_lease_duration" .lease }}{{ end }}
{{- if ne .role "prefill" }}
{{- $_ := set $config "kv_load_failure_policy" "recompute" }}
{{- $_ := set $extra "bidirectional_kv_xfer" true }}
{{- $_ := set $extra "decoder_kv_blocks_ttl" 1 }}
{{- end }}
{{- set $config "kv_connector_extra_config" $extra | toJson }}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{ .Values.serviceAccount.name | default .Release.Name }}
{{- end }}

{{- define "tandem.picker" -}}
{{- eq (dig "extProc" "protocol" "tandem" .Values.config) "endpointPicker" -}}
{{- end }}

{{/* Whether Envoy has Tandem loaded (docs/howto/inside-envoy.md). */}}
{{- define "tandem.inside" -}}
{{- eq (dig "envoy" "run" "beside" .Values.config) "inside" -}}
{{- end }}

{{/* The Secret with the ticket key; empty if none is needed: replicas share a key through Redis, and one makes its own. */}}
{{- define "tandem.ticketSecret" -}}
{{- if .Values.tickets.existingSecret }}{{ .Values.tickets.existingSecret }}
{{- else if and (ne (include "tandem.picker" .) "true") (ne (include "tandem.inside" .) "true") (not (include "tandem.redis" .)) }}{{ .Release.Name }}-ticket
{{- end }}
{{- end }}

{{/* How long streams may take to end: those of an endpoint picker last as long as the answers that it watches. */}}
{{- define "tandem.drain" -}}
{{ .Values.drain | default (ternary "10m" "20s" (eq (include "tandem.picker" .) "true")) }}
{{- end }}

{{/* Seconds of a duration such as 5s, 500ms or 1m, rounded up. */}}
{{- define "tandem.seconds" -}}
{{- $n := int (regexFind "^[0-9]+" .) }}
{{- if hasSuffix "ms" . }}{{ div (add $n 999) 1000 }}{{ else if hasSuffix "m" . }}{{ mul $n 60 }}{{ else }}{{ $n }}{{ end }}
{{- end }}

{{/* Nine tenths of a quantity of memory, in bytes. */}}
{{- define "tandem.goMemory" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $text := toString . }}
{{- $unit := regexFind "[A-Za-z]*$" $text }}
{{- if not (hasKey $units $unit) }}{{ fail (printf "resources.limits.memory: %s is no quantity of memory, such as 2Gi" $text) }}{{ end }}
{{- printf "%.0f" (mulf (float64 (trimSuffix $unit $text)) (get $units $unit) 0.9) }}
{{- end }}

{{/* Ports that engines connect to, as "name port" lines: notifications of LMCache, and KV events. */}}
{{- define "tandem.enginePorts" -}}
{{- $lmcache := false }}
{{- range .Values.config.pools }}
{{- if eq .kvTransfer "lmcache" }}{{ $lmcache = true }}{{ end }}
{{- end }}
{{- if or $lmcache .Values.config.notices }}
tcp-notices {{ regexFind "[0-9]+$" (dig "notices" "listen" "0.0.0.0:7500" .Values.config) }}
{{- end }}
{{- range $i, $pool := .Values.config.pools }}
{{- with dig "kvEvents" "listen" "" $pool }}
tcp-events-{{ $i }} {{ regexFind "[0-9]+$" . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.config" -}}
{{- $name := printf "%s.%s.svc.%s" .Release.Name .Release.Namespace .Values.clusterDomain }}
{{- $config := dict "extProc" (dict "listen" "0.0.0.0:9002") "replan" (dict "listen" "0.0.0.0:9003") "admin" (dict "listen" "0.0.0.0:9090") }}
{{- if ne (include "tandem.picker" .) "true" }}
{{- $_ := set $config "envoy" (dict "listen" "0.0.0.0:8080" "extProcs" (list (printf "%s:9002" $name)) "replans" (list (printf "%s:9003" $name))) }}
{{- if or .Values.envoy.enabled (eq (include "tandem.inside" .) "true") }}{{ $_ := set $config.envoy "stats" "0.0.0.0:9902" }}{{ end }}
{{- if and (include "tandem.redis" .) (ne (include "tandem.inside" .) "true") }}{{ $_ := set $config.envoy "replicas" "redis" }}{{ end }}
{{- end }}
{{- if include "tandem.ticketSecret" . }}
{{- $_ := set $config "tickets" (dict "keyFile" "/etc/tandem-ticket/ticket.key") }}
{{- end }}
{{- if contains "tcp-notices" (include "tandem.enginePorts" .) }}
{{- $_ := set $config "notices" (dict "listen" "0.0.0.0:7500") }}
{{- end }}
{{- with include "tandem.redis" . }}
{{- $redis := dict "url" . }}
{{- if $.Values.redis.existingSecret }}{{ $_ := set $redis "passwordFile" "/etc/tandem-redis/password" }}{{ end }}
{{- $_ := set $config "state" (dict "redis" $redis) }}
{{- end }}
{{- if .Values.admin.existingSecret }}
{{- $_ := set $config "admin" (dict "listen" "0.0.0.0:9090" "tokenFile" "/etc/tandem-admin/token") }}
{{- end }}
{{- if .Values.envoyGateway.enabled }}
{{- $_ := set $config "envoyGateway" (dict "listen" "0.0.0.0:9004") }}
{{- end }}
{{- $config = mergeOverwrite $config (deepCopy .Values.config) }}
{{- if .Values.engines.enabled }}{{ $_ := mergeOverwrite (first $config.pools) (include "tandem.enginePool" . | fromYaml) }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{/* What a platform adds to a pod: .Values of Tandem, or .Values.envoy. */}}
{{- define "tandem.placement" -}}
{{- with .imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Container ports that engines connect to. */}}
{{- define "tandem.portsForEngines" -}}
{{- range splitList "\n" (include "tandem.enginePorts" . | trim) }}
{{- with . }}
- {name: {{ first (splitList " " .) }}, containerPort: {{ last (splitList " " .) }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Where Tandem finds the files that its configuration names. */}}
{{- define "tandem.mounts" -}}
- {name: config, mountPath: /etc/tandem, readOnly: true}
{{- if include "tandem.ticketSecret" . }}
- {name: ticket, mountPath: /etc/tandem-ticket, readOnly: true}
{{- end }}
{{- if .Values.redis.existingSecret }}
- {name: redis, mountPath: /etc/tandem-redis, readOnly: true}
{{- end }}
{{- if .Values.admin.existingSecret }}
- {name: admin, mountPath: /etc/tandem-admin, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{- define "tandem.volumes" -}}
- {name: config, configMap: {name: {{ .Release.Name }}}}
{{- with include "tandem.ticketSecret" . }}
- {name: ticket, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.redis.existingSecret }}
- {name: redis, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.admin.existingSecret }}
- {name: admin, secret: {secretName: {{ . }}}}
{{- end }}
{{- with .Values.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}
