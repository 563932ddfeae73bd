{{/* Names, labels, images and the few things that more than one template needs. */}}

{{- define "kvrouter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* At most 50 characters: suffixes such as -nats follow. */}}
{{- define "kvrouter.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "kvrouter.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvrouter.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* "true" or "". A string such as "off" is true to Go templates, and --set-string makes strings. */}}
{{- define "kvrouter.on" -}}
{{- if has (toString . | lower) (list "true" "on" "enabled") -}}true{{- end -}}
{{- end }}

{{/* The same as a quoted word, for variables. */}}
{{- define "kvrouter.word" -}}
{{- include "kvrouter.on" . | default "false" | quote -}}
{{- end }}

{{- define "kvrouter.serviceAccountName" -}}
{{- if include "kvrouter.on" .Values.serviceAccount.create -}}
{{- default (printf "%s-operator" (include "kvrouter.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* Of what an instance of the chart made: takes (dict "root" $ "component" "operator"). */}}
{{- define "kvrouter.selectorLabels" -}}
app.kubernetes.io/name: {{ dict "operator" "kv-router-operator" "nats" "nats-server" | dig .component (include "kvrouter.name" .root) }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvrouter.labels" -}}
{{ include "kvrouter.selectorLabels" . }}
app.kubernetes.io/part-of: kvrouter
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvrouter.operatorImage" -}}
{{ default (printf "%s/kv-router-operator:%s" .Values.registry .Chart.AppVersion) .Values.operator.image }}
{{- end }}

{{- define "kvrouter.routerImage" -}}
{{ default (printf "%s/kv-router:%s" .Values.registry .Chart.AppVersion) .Values.router.image }}
{{- end }}

{{/* The broker of pools that name none; empty for none. A broker that asks for credentials is none: such a pool could not give any. */}}
{{- define "kvrouter.natsUrl" -}}
{{- if include "kvrouter.on" .Values.nats.enabled -}}
{{- if not .Values.nats.auth.existingSecret -}}
nats://{{ include "kvrouter.fullname" . }}-nats.{{ .Release.Namespace }}.svc:4222
{{- end -}}
{{- else -}}
{{ .Values.nats.url }}
{{- end -}}
{{- end }}

{{- define "kvrouter.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvrouter.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvrouter.pullSecrets" -}}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end }}

{{/* Contradictions that a schema cannot see. Called once, by the operator's template. */}}
{{- define "kvrouter.check" -}}
{{- $replicas := int .Values.replicas -}}
{{- if and (gt $replicas 1) (not (include "kvrouter.on" .Values.leaderElection.enabled)) -}}
{{- fail (printf "replicas is %d and leaderElection.enabled is off: two operators would work against each other; set replicas to 1, or leave leader election on" $replicas) -}}
{{- end -}}
{{- $broker := include "kvrouter.on" .Values.nats.enabled -}}
{{- if and $broker .Values.nats.url -}}
{{- fail "nats.url and nats.enabled are both set: the url is for a broker of your own; set nats.enabled to false, or remove the url" -}}
{{- end -}}
{{- if and $broker (include "kvrouter.on" .Values.nats.networkPolicy.enabled) (not .Values.nats.networkPolicy.namespaces) (not .Values.watchNamespaces) -}}
{{- fail "nats.networkPolicy.enabled would shut everybody out: list the namespaces of routers and engines in nats.networkPolicy.namespaces" -}}
{{- end -}}
{{- if and (include "kvrouter.on" .Values.podMonitor.enabled) (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "podMonitor.enabled needs the Prometheus operator's definitions (monitoring.coreos.com/v1), which this cluster does not have: install them, or set podMonitor.enabled to false; with helm template add --api-versions monitoring.coreos.com/v1" -}}
{{- end -}}
{{- if and .Values.test.model (not .Values.test.routerUrl) -}}
{{- fail "test.model needs test.routerUrl: without it every router is asked for its own model" -}}
{{- end -}}
{{- end }}
