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

{{/* The secret keys of the link, for a Secret of the chart's own, as its data. Templates cannot make a CURVE key pair, but
any 40 letters and digits are a secret key (Z85; 238 random bits), from which the services derive the public one. What
the cluster has is kept whole, the further lines of a rotation too. */}}
{{- define "tandem.linkKeys" -}}
{{- $of := .Values.linkEncryption -}}
{{- if not (hasKey $of "generated") -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "tandem.linkKeysSecretName" .) -}}
{{- $data := default dict (default dict $secret).data -}}
{{- if not (and (hasKey $data "engine.secret") (hasKey $data "frontend.secret")) -}}
{{- $data = dict "engine.secret" (randAlphaNum 40 | b64enc) "frontend.secret" (randAlphaNum 40 | b64enc) -}}
{{- end -}}
{{- $_ := set $of "generated" $data -}}
{{- end -}}
{{- toYaml $of.generated -}}
{{- end -}}

{{- define "tandem.linkKeysEnv" -}}
{{- if .Values.linkEncryption.enabled -}}
- name: TANDEM_LINK_KEYS
  value: /etc/tandem/link-keys
{{- end -}}
{{- end -}}

{{- define "tandem.linkKeysMount" -}}
{{- if .Values.linkEncryption.enabled -}}
- name: link-keys
  mountPath: /etc/tandem/link-keys
  readOnly: true
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "side" "engine" "other" "frontend"): with a Secret of yours, only what this side must know. */}}
{{- define "tandem.linkKeysVolume" -}}
{{- if .root.Values.linkEncryption.enabled -}}
- name: link-keys
  secret:
    secretName: {{ include "tandem.linkKeysSecretName" .root }}
    defaultMode: 0440
    items:
      {{- $theirs := ternary "public" "secret" (ne .root.Values.linkEncryption.existingSecret "") }}
      {{- range list (printf "%s.secret" .side) (printf "%s.%s" .other $theirs) }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end -}}
{{- end -}}

{{/* Keys are read at start; a Secret of yours is not looked into. */}}
{{- define "tandem.linkKeysChecksum" -}}
{{- if and .Values.linkEncryption.enabled (not .Values.linkEncryption.existingSecret) -}}
checksum/link-keys: {{ include "tandem.linkKeys" . | sha256sum }}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "engine"): OpenTelemetry's own variables, which both services obey. */}}
{{- define "tandem.tracingEnv" -}}
{{- $of := .root.Values.tracing -}}
{{- if $of.endpoint -}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $of.endpoint | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ $of.protocol | quote }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $of.ratio | quote }}
{{- with $of.headersSecret.name }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $of.headersSecret.key }}
{{- end }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .root.Release.Namespace }},k8s.pod.name=$(POD_NAME),k8s.container.name={{ .component }}
{{- end -}}
{{- end -}}
