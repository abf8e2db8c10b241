{{/*
What frontend and engine pods have in common.
*/}}

{{/* (dict "root" $ "image" .Values.frontend.image) */}}
{{- define "tandem.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry -}}
{{- $repository := .image.repository -}}
{{- with $registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A settings field is a variable: lists, numbers and booleans as JSON, which pydantic-settings reads. */}}
{{- define "tandem.settingsEnv" -}}
{{- range $field, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
- name: {{ printf "TANDEM_%s" (upper $field) }}
  value: {{ ternary $value (toRawJson $value) (kindIs "string" $value) | quote }}
{{ end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.huggingFaceEnv" -}}
- name: HF_HUB_DISABLE_TELEMETRY
  value: "1"
{{- if or .Values.huggingFace.token .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.huggingFaceSecretName" . }}
      key: {{ .Values.huggingFace.key }}
{{- end }}
{{- with .Values.huggingFace.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The pod-level fields that frontends and engines share: (dict "root" $ "of" .Values.frontend "component" … "pool" …). */}}
{{- define "tandem.podFields" -}}
{{- $root := .root -}}
{{- $of := .of -}}
# Without this a Service called "tandem" puts TANDEM_PORT=tcp://… into every pod, and that is a setting's name.
enableServiceLinks: false
automountServiceAccountToken: {{ and (eq .component "frontend") (eq $root.Values.frontend.discovery "kubernetes") }}
serviceAccountName: {{ include "tandem.serviceAccountName" (dict "root" $root "component" .component "serviceAccount" $of.serviceAccount) }}
{{- with concat $root.Values.global.imagePullSecrets $of.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := deepCopy . }}
  {{- if not $constraint.labelSelector }}
  {{- $labels := include "tandem.selectorLabels" (dict "root" $root "component" $.component "pool" $.pool) | fromYaml }}
  {{- $_ := set $constraint "labelSelector" (dict "matchLabels" $labels) }}
  {{- end }}
  - {{ toYaml $constraint | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A probe: (dict "path" "/health/live" "port" "http" "with" .Values.frontend.probes.liveness). */}}
{{- define "tandem.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
{{ toYaml .with }}
{{- end -}}

{{- define "tandem.preStop" -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int . }}
{{- end -}}

{{/* The API keys, one a line, for a Secret of the chart's own. Made once: what the cluster already has is kept; and
remembered, since they are asked for twice in one rendering. */}}
{{- define "tandem.apiKeys" -}}
{{- $of := .Values.apiKeys -}}
{{- if $of.keys -}}
{{- join "\n" $of.keys -}}
{{- else -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "tandem.apiKeySecretName" .) -}}
{{- $data := default dict (default dict $secret).data -}}
{{- if hasKey $data $of.key -}}
{{- get $data $of.key | b64dec -}}
{{- else -}}
{{- if not (hasKey $of "generated") }}{{ $_ := set $of "generated" (printf "tandem-%s" (randAlphaNum 40)) }}{{ end -}}
{{- $of.generated -}}
{{- end -}}
{{- end -}}
{{- end -}}
