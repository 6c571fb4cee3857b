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

{{/* Whether Tandem is in the Envoy of an Envoy Gateway (docs/howto/envoy-gateway-module.md). */}}
{{- define "tandem.module" -}}
{{- eq .Values.gateway.mode "module" -}}
{{- end }}

{{/* What has no meaning there. */}}
{{- define "tandem.moduleChecks" -}}
{{- $why := "gateway.mode module: " }}
{{- if .Values.envoy.enabled }}{{ fail (print $why "envoy.enabled is another Envoy; leave it out") }}{{ end }}
{{- if .Values.envoyGateway.enabled }}{{ fail (print $why "envoyGateway.enabled is the extension of Envoy Gateway, another way; leave one out") }}{{ end }}
{{- if .Values.inferencePool.enabled }}{{ fail (print $why "inferencePool.enabled: Envoy Gateway has no InferencePool") }}{{ end }}
{{- if or .Values.autoscaling.enabled .Values.serviceMonitor.enabled }}{{ fail (print $why "the pods are the Gateway's Envoys: autoscaling.enabled is envoyHpa of the EnvoyProxy, and serviceMonitor.enabled a PodMonitor of port 9090, which gateway.operator opens (admin: 0.0.0.0:9090)") }}{{ end }}
{{- if .Values.admin.existingSecret }}{{ fail (print $why "admin.existingSecret: the operator's port is the Gateway owner's (gateway.operator)") }}{{ end }}
{{- if and .Values.gateway.attach (ne (len (splitList "/" .Values.gateway.attach)) 2) }}{{ fail "gateway.attach is NAME/SECTION, such as web/https" }}{{ end }}
{{- range .Values.config.pools }}
{{- if dig "discovery" "kubernetes" "" . }}{{ if not $.Values.engines.enabled }}{{ fail (printf "%spool %s is found by labels, for which Envoy's pods have no rights: name headless Services (discovery.dns)" $why .name) }}{{ end }}{{ end }}
{{- end }}
{{- end }}

{{/* The name of the ConfigMap, which is in the namespace of Envoy's pods: another namespace's release may have the name of this one. */}}
{{- define "tandem.inEnvoys" -}}
{{ printf "%s.%s" .Release.Namespace .Release.Name | trunc 58 | trimSuffix "." }}
{{- end }}

{{/* The name of the replica, of which there is one in each Envoy. A file's is another one than a policy's: who switches between them gets
another replica, where a running Envoy refuses the same name of another source. */}}
{{- define "tandem.replicaName" -}}
{{ include "tandem.inEnvoys" . }}{{ if eq (include "tandem.moduleFile" .) "true" }}.file{{ end }}
{{- end }}

{{/* Whether the configuration is in a file in Envoy's pods: a policy may not say where Redis is (docs/security.md). */}}
{{- define "tandem.moduleFile" -}}
{{- or .Values.gateway.file (ne (include "tandem.redis" .) "") (hasKey .Values.config "state") (hasKey .Values.config "tracing") (hasKey .Values.config "record") -}}
{{- end }}

{{/* The configuration of the replica: without what holds in a gateway's Envoy anyway. */}}
{{- define "tandem.moduleConfig" -}}
{{- $config := omit (deepCopy .Values.config) "extProc" "replan" "admin" "envoy" }}
{{- with dig "envoy" "pathPrefixes" "" .Values.config }}{{ $_ := set $config "envoy" (dict "pathPrefixes" .) }}{{ end }}
{{- with include "tandem.redis" . }}
{{- $redis := dict "url" . }}
{{- if $.Values.redis.existingSecret }}{{ $_ := set $redis "passwordFile" "/etc/tandem-redis/password" }}{{ end }}
{{- $_ := set $config "state" (dict "redis" $redis) }}
{{- end }}
{{- if .Values.engines.enabled }}
{{- $pool := mergeOverwrite (first $config.pools) (omit (include "tandem.enginePool" . | fromYaml) "discovery") }}
{{- $dns := list }}
{{- range $role, $replicas := include "tandem.engineRoles" . | fromJson }}
{{- $dns = append $dns (dict "name" (printf "%s-%s.%s.svc.%s" $.Release.Name (ternary "engines" $role (eq $role "both")) $.Release.Namespace $.Values.clusterDomain) "port" 8000 "role" $role) }}
{{- end }}
{{- $_ := set $pool "discovery" (dict "dns" $dns) }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Where the route's requests go: the engines that decode, as one Service or one list of addresses. */}}
{{- define "tandem.decoding" -}}
{{- $services := list }}{{- $endpoints := list }}
{{- range (include "tandem.moduleConfig" . | fromYaml).pools }}
{{- range dig "discovery" "dns" list . }}
{{- if not (has .role (list "prefill" "encode")) }}
{{- $parts := splitList "." .name }}
{{- if and (gt (len $parts) 1) (ne (index $parts 1) $.Release.Namespace) }}{{ fail (printf "gateway.mode module: %s is in another namespace than the release" .name) }}{{ end }}
{{- $services = append $services (dict "name" (first $parts) "port" (int .port)) | uniq }}
{{- end }}
{{- end }}
{{- range .endpoints }}
{{- if not (has .role (list "prefill" "encode")) }}
{{- $port := regexFind "[0-9]+$" .address | int }}
{{- $host := trimSuffix (printf ":%d" $port) .address | trimPrefix "[" | trimSuffix "]" }}
{{- $endpoints = append $endpoints (ternary (dict "ip" (dict "address" $host "port" $port)) (dict "fqdn" (dict "hostname" $host "port" $port)) (regexMatch "^[0-9.]+$|:" $host)) | uniq }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne (add (len $services) (min 1 (len $endpoints))) 1 }}
{{- fail "gateway.mode module: the engines that decode have to be one headless Service (discovery.dns) or a list (endpoints): of several backends Envoy Gateway makes weighted clusters" }}
{{- end }}
{{- dict "services" $services "endpoints" $endpoints | toJson }}
{{- end }}

{{/* The part of an EnvoyProxy's spec that has its Envoys load Tandem. */}}
{{- define "tandem.envoyProxy" -}}
{{- $file := eq (include "tandem.moduleFile" .) "true" }}
{{- $config := or $file (not (empty .Values.gateway.operator)) }}
{{- $image := printf "%s:%s" .Values.inside.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- $library := printf "%s:%s" .Values.gateway.libraryImage (.Values.image.tag | default .Chart.AppVersion) }}
{{- $from := .Values.gateway.libraryFrom -}}
provider:
  type: Kubernetes
  kubernetes:
    envoyDeployment:
      {{- if not .Values.gateway.attach }}
      replicas: {{ .Values.replicas }}
      {{- end }}
      {{- if eq $from "initContainer" }}
      initContainers:
      - name: library
        image: {{ $library | quote }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        volumeMounts: [{name: library, mountPath: /out}]
      {{- end }}
      container:
        {{- if eq $from "image" }}
        image: {{ $image | quote }}
        {{- end }}
        resources: {{- toYaml .Values.resources | nindent 10 }}
        {{- if or (dig "limits" "memory" "" .Values.resources) .Values.gateway.operator .Values.extraEnv }}
        env:
        {{- with dig "limits" "memory" "" .Values.resources }}
        - {name: GOMEMLIMIT, value: "{{ div (include "tandem.goMemory" .) 5 }}"}   # Envoy Gateway lets Envoy's own heap grow to 80 %
        {{- end }}
        {{- if .Values.gateway.operator }}
        - {name: TANDEM_OPERATOR, value: /etc/tandem/operator.yaml}
        {{- end }}
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- end }}
        {{- if or $config (ne $from "image") .Values.redis.existingSecret }}
        volumeMounts:
        {{- if $config }}
        - {name: tandem, mountPath: /etc/tandem, readOnly: true}
        {{- end }}
        {{- if ne $from "image" }}
        - {name: library, mountPath: {{ dir .Values.gateway.library }}, readOnly: true}
        {{- end }}
        {{- if .Values.redis.existingSecret }}
        - {name: redis, mountPath: /etc/tandem-redis, readOnly: true}
        {{- end }}
        {{- end }}
      {{- if or $config (ne $from "image") .Values.redis.existingSecret .Values.imagePullSecrets }}
      pod:
        {{- with .Values.imagePullSecrets }}
        imagePullSecrets: {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- if or $config (ne $from "image") .Values.redis.existingSecret }}
        volumes:
        {{- if $config }}
        - {name: tandem, configMap: {name: {{ include "tandem.inEnvoys" . }}}}
        {{- end }}
        {{- if eq $from "initContainer" }}
        - {name: library, emptyDir: {}}
        {{- else if eq $from "imageVolume" }}
        - {name: library, image: {reference: {{ $library | quote }}, pullPolicy: {{ .Values.image.pullPolicy }}}}
        {{- end }}
        {{- with .Values.redis.existingSecret }}
        - {name: redis, secret: {secretName: {{ . }}}}
        {{- end }}
        {{- end }}
      {{- end }}
dynamicModules:
- name: tandem
  source: {type: Local, local: {path: {{ .Values.gateway.library }}}}
  doNotClose: true   # Go's runtime cannot be unloaded
filterOrder:   # without these a request that is denied or limited would have been prefilled
- {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.rbac}
- {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.local_ratelimit}
- {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.ratelimit}
- {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.compressor}
shutdown: {drainTimeout: {{ .Values.gateway.drainTimeout }}}   # a change of the policy ends streams that last longer
{{- end }}

{{/* Which pods connect to engines and to Redis, as peers of a NetworkPolicy. */}}
{{- define "tandem.peers" -}}
{{- if eq (include "tandem.module" .) "true" -}}
- {namespaceSelector: {}, podSelector: {matchLabels: {app.kubernetes.io/managed-by: envoy-gateway}}}
{{- else -}}
- podSelector: {matchLabels: {{ include "tandem.labels" . | fromYaml | toJson }}}
{{- end }}
{{- end }}
