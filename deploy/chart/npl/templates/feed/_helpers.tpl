{{/*
SPDX-License-Identifier: Apache-2.0
The feed's environment variables.
*/}}
{{- define "npl.feedVariables" -}}
{{- $feed := .Values.feed -}}
- name: NPL_FEED_XDS
  value: {{ $feed.xds.enabled | ternary (printf "[::]:%d" (int $feed.xds.port)) "none" | quote }}
- name: NPL_FEED_XDS_MAX_NAMES
  value: {{ int $feed.xds.maxNames | quote }}
- name: NPL_FEED_DNS
  value: {{ $feed.dns.enabled | ternary (printf "[::]:%d" (int $feed.dns.port)) "none" | quote }}
- name: NPL_FEED_HTTP
  value: {{ printf "[::]:%d" (int $feed.http.port) | quote }}
- name: NPL_FEED_ZONE
  value: {{ $feed.dns.zone | quote }}
- name: NPL_FEED_LOG_FORMAT
  value: {{ $feed.logFormat }}
- name: NPL_FEED_SHUTDOWN_DELAY
  value: {{ printf "%ds" (int $feed.shutdownDelaySeconds) | quote }}
{{- /* The agents' options that also apply to the feed. */}}
{{- with .Values.config.annotationDomain }}
- name: NPL_FEED_ANNOTATION_DOMAIN
  value: {{ . | quote }}
{{- end }}
{{- with include "npl.feedPortRange" . }}
- name: NPL_FEED_PORT_RANGE
  value: {{ . | quote }}
{{- end }}
{{- with .Values.config.drain }}
- name: NPL_FEED_DRAIN
  value: {{ . | quote }}
{{- end }}
{{- with $feed.services }}
- name: NPL_FEED_SERVICES
  value: {{ . | quote }}
{{- end }}
{{- with $feed.allow }}
- name: NPL_FEED_ALLOW
  value: {{ join "," . | quote }}
{{- end }}
{{- if $feed.tokenSecret.name }}
- name: NPL_FEED_TOKEN_FILE
  value: /etc/npl-feed/token/token
{{- end }}
{{- if $feed.tls.secretName }}
- name: NPL_FEED_TLS_CERT
  value: /etc/npl-feed/tls/tls.crt
- name: NPL_FEED_TLS_KEY
  value: /etc/npl-feed/tls/tls.key
{{- if $feed.tls.clientCertificates }}
- name: NPL_FEED_TLS_CLIENT_CA
  value: /etc/npl-feed/tls/ca.crt
{{- end }}
{{- end }}
{{- end }}

{{/* The action of a probe of the feed; the argument is a list of the feed's values and the path of the probe. */}}
{{- define "npl.feedProbe" -}}
{{- $feed := index . 0 -}}
{{- if and $feed.tls.secretName $feed.tls.clientCertificates -}}
# The probe only connects, because the kubelet has no client certificate for a request.
tcpSocket:
  port: http
{{- else -}}
httpGet:
  path: {{ index . 1 }}
  port: http
  {{- if $feed.tls.secretName }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end }}

{{/*
The smallest range that includes the port ranges of all agents; empty if no value sets a port range. `61000-62000` is
the agents' default.
*/}}
{{- define "npl.feedPortRange" -}}
{{- $ranges := list -}}
{{- range .Values.nodeGroups -}}
{{- with (.config | default dict).portRange -}}
{{- $ranges = append $ranges . -}}
{{- end -}}
{{- end -}}
{{- if or $ranges .Values.config.portRange -}}
{{- $first := .Values.config.portRange | default "61000-62000" | splitList "-" -}}
{{- $start := index $first 0 | atoi -}}
{{- $end := index $first 1 | atoi -}}
{{- range $ranges -}}
{{- $ends := splitList "-" . -}}
{{- $start = min $start (index $ends 0 | atoi) -}}
{{- $end = max $end (index $ends 1 | atoi) -}}
{{- end -}}
{{ $start }}-{{ $end }}
{{- end -}}
{{- end }}
