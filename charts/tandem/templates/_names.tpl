{{/*
Names and labels. An object's name is cut with a hash of the whole name, never plainly, so that two long release names
that begin alike stay apart.
*/}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "tandem.name" .) .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tandem.name" .) -}}
{{- end -}}
{{- end -}}

{{/* The name of one object: (dict "root" $ "suffix" "frontend" "limit" 63). */}}
{{- define "tandem.objectName" -}}
{{- $name := include "tandem.fullname" .root -}}
{{- with .suffix }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- $limit := default 63 .limit | int -}}
{{- if gt (len $name) $limit -}}
{{- $name = printf "%s-%s" (trunc (int (sub $limit 9)) $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "tandem.frontendName" -}}
{{- include "tandem.objectName" (dict "root" . "suffix" "frontend") -}}
{{- end -}}

{{/* A pool's StatefulSet and headless Service: (dict "root" $ "pool" $name). 52, since the controller appends a hash of
11 characters to it in a label of at most 63. */}}
{{- define "tandem.engineName" -}}
{{- include "tandem.objectName" (dict "root" .root "suffix" (printf "engine-%s" .pool) "limit" 52) -}}
{{- end -}}

{{/* (dict "root" $ "component" "engine" "pool" "default"); pool only for engines. */}}
{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
tandem/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tandem
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Without versions: a new chart that changes nothing in a pod must not make every engine load its model again. */}}
{{- define "tandem.podLabels" -}}
{{ include "tandem.selectorLabels" . }}
{{- with merge dict .of.podLabels .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- if .serviceAccount.create -}}
{{- default (include "tandem.objectName" (dict "root" .root "suffix" .component)) .serviceAccount.name -}}
{{- else -}}
{{- default "default" .serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tandem.apiKeySecretName" -}}
{{- default (include "tandem.objectName" (dict "root" . "suffix" "api-keys")) .Values.apiKeys.existingSecret -}}
{{- end -}}

{{- define "tandem.linkKeysSecretName" -}}
{{- default (include "tandem.objectName" (dict "root" . "suffix" "link-keys")) .Values.linkEncryption.existingSecret -}}
{{- end -}}

{{- define "tandem.huggingFaceSecretName" -}}
{{- default (include "tandem.objectName" (dict "root" . "suffix" "hugging-face")) .Values.huggingFace.existingSecret -}}
{{- end -}}

{{- define "tandem.chatTemplatesName" -}}
{{- include "tandem.objectName" (dict "root" . "suffix" "chat-templates") -}}
{{- end -}}
