{{/*
SPDX-License-Identifier: Apache-2.0
Names of objects do not contain the release's name, because a Node runs only one agent. Helm refuses a second release,
because the cluster-scoped objects of both releases would have the same names.
*/}}

{{/* The labels of every object; the argument is the root context. */}}
{{- define "npl.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: npl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: npl
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
The labels by which a DaemonSet of agents selects its Pods. The labels never change: a selector is immutable. With the
root context as the argument, the labels select all agents. The default DaemonSet also selects its Pods by the labels of
all agents, because a DaemonSet controller ignores Pods that another DaemonSet owns.
*/}}
{{- define "npl.selector" -}}
app.kubernetes.io/name: npl
app.kubernetes.io/component: agent
{{- with .group }}
npl/node-group: {{ .name | quote }}
{{- end }}
{{- end }}

{{/* The name of a DaemonSet of agents; the argument is the name of its group of Nodes, or empty. */}}
{{- define "npl.daemonSetName" -}}
npl-agent{{ with . }}-{{ . }}{{ end }}
{{- end }}

{{/* The names of all DaemonSets of agents, separated by commas; the argument is the root context. */}}
{{- define "npl.daemonSetNames" -}}
{{ include "npl.daemonSetName" "" }}
{{- range .Values.nodeGroups }},{{ include "npl.daemonSetName" .name }}{{ end }}
{{- end }}

{{- define "npl.image" -}}
{{ include "npl.imageName" (list . .Values.image) }}
{{- end }}

{{/* The name of an image; the argument is a list of the root context and the values of the image. */}}
{{- define "npl.imageName" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The labels by which the feed's Deployment selects its Pods. The labels never change: a selector is immutable. */}}
{{- define "npl.feedSelector" -}}
app.kubernetes.io/name: npl
app.kubernetes.io/component: feed
{{- end }}

{{- define "npl.feedLabels" -}}
{{ include "npl.labels" . }}
app.kubernetes.io/component: feed
{{- end }}

{{- define "npl.domain" -}}
{{ .Values.config.annotationDomain | default "nodeportlocal.antrea.io" }}
{{- end }}

{{/*
The affinity that restricts Pods to the Nodes on which the image can run. For a DaemonSet of agents, the affinity also
restricts the Pods to the Nodes of the DaemonSet's group, and excludes the Nodes of the groups in `before`.
*/}}
{{- define "npl.affinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions:
          - key: kubernetes.io/os
            operator: In
            values: [linux]
          # The processor architectures for which the image is built.
          - key: kubernetes.io/arch
            operator: In
            values: [{{ join ", " .Values.architectures }}]
          # Virtual Nodes (virtual-kubelet, AWS Fargate) have no kernel of their own, and run no Pod of a DaemonSet.
          - key: type
            operator: NotIn
            values: [virtual-kubelet]
          - key: eks.amazonaws.com/compute-type
            operator: NotIn
            values: [fargate]
          {{- with .group }}
          # The Nodes of this group.
          - key: {{ .nodeLabel.key | quote }}
            operator: In
            values: {{ toJson .nodeLabel.values }}
          {{- end }}
          {{- range .before }}
          # The Nodes of the group {{ .name }} run the agents of the DaemonSet {{ include "npl.daemonSetName" .name }}.
          - key: {{ .nodeLabel.key | quote }}
            operator: NotIn
            values: {{ toJson .nodeLabel.values }}
          {{- end }}
{{- end }}

{{- define "npl.podSecurityContext" -}}
seccompProfile:
  {{- toYaml .Values.podSecurity.seccompProfile | nindent 2 }}
{{- with .Values.podSecurity.seLinuxOptions }}
# Where SELinux enforces its policy, containers with the default type may not call bpf(). Nodes without SELinux ignore
# this option.
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The security context of a container of the agent's image; the argument is the list of its capabilities. */}}
{{- define "npl.securityContext" -}}
# Kubernetes sets no ambient capabilities, so only a process with uid 0 receives the capabilities below.
runAsUser: 0
runAsGroup: 0
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: [{{ join ", " . }}]
{{- end }}

{{/* The text of an option's value. Helm reads large integers as floating-point numbers, which it would write as 1e+06. */}}
{{- define "npl.option" -}}
{{- if kindIs "float64" . -}}{{ int64 . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end }}

{{/* The annotations of the Helm hook that retires every Node. */}}
{{- define "npl.hook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
