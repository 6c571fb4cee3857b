{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "tandem.picker" -}}
{{- eq (dig "extProc" "protocol" "tandem" .Values.config) "endpointPicker" -}}
{{- end }}
{{- define "tandem.config" -}}
{{- $config := dict "extProc" (dict "listen" "0.0.0.0:9002") "replan" (dict "listen" "0.0.0.0:9003") "admin" (dict "listen" "0.0.0.0:9090") }}
{{- if ne (include "tandem.picker" .) "true" }}
{{- $_ := set $config "tickets" (dict "keyFile" "/etc/tandem-ticket/ticket.key") }}
{{- end }}
{{- with .Values.redis.url }}{{- $_ := set $config "state" (dict "redis" (dict "url" .)) }}{{- end }}
{{- if .Values.envoyGateway.enabled }}
{{- $_ := set $config "envoyGateway" (dict "listen" "0.0.0.0:9004") }}
{{- $_ := set $config "envoy" (dict "extProcs" (list (printf "%s.%s.svc.cluster.local:9002" .Release.Name .Release.Namespace))) }}
{{- end }}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) }}
{{- end }}
