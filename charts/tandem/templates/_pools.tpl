{{/*
Engine pools: what `pools` says, over what `engine` says. And what the frontends must know of them.
*/}}

{{/* Every pool, whole, as JSON: name -> values. */}}
{{- define "tandem.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := default (dict "default" dict) .Values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.engine) (deepCopy (default dict $own)) -}}
{{- if not $pool.model -}}
{{- fail (printf "pools.%s: no model. Set pools.%s.model (or engine.model for every pool) to a name on the Hugging Face hub or to a folder." $name $name) -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled (lt (int $pool.autoscaling.maxReplicas) (int $pool.autoscaling.minReplicas)) -}}
{{- fail (printf "pools.%s: autoscaling.maxReplicas (%d) is below autoscaling.minReplicas (%d)." $name (int $pool.autoscaling.maxReplicas) (int $pool.autoscaling.minReplicas)) -}}
{{- end -}}
{{- $cache := $pool.modelCache -}}
{{- if and (eq $cache.type "existingClaim") (not $cache.claimName) -}}
{{- fail (printf "pools.%s: modelCache.type is existingClaim; name the claim in modelCache.claimName." $name) -}}
{{- end -}}
{{- if and (eq $cache.type "hostPath") (not $cache.hostPath) -}}
{{- fail (printf "pools.%s: modelCache.type is hostPath; give the node's folder in modelCache.hostPath." $name) -}}
{{- end -}}
{{- if and (eq $cache.type "image") (not $cache.image.reference) -}}
{{- fail (printf "pools.%s: modelCache.type is image; give the OCI image that holds the model in modelCache.image.reference." $name) -}}
{{- end -}}
{{- if and $pool.download.enabled (include "tandem.cacheReadOnly" $cache) -}}
{{- fail (printf "pools.%s: download.enabled needs a modelCache that can be written; type %s is read-only here." $name $cache.type) -}}
{{- end -}}
{{- if and $pool.download.enabled (hasPrefix "/" $pool.model) -}}
{{- fail (printf "pools.%s: download.enabled fetches from the Hugging Face hub, but model is the path %s." $name $pool.model) -}}
{{- end -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- toRawJson $pools -}}
{{- end -}}

{{/* "true" if nothing can be written to this model cache. */}}
{{- define "tandem.cacheReadOnly" -}}
{{- if or .readOnly (eq .type "image") }}true{{ end -}}
{{- end -}}

{{/* The models a frontend serves, as the JSON that TANDEM_MODELS takes. */}}
{{- define "tandem.models" -}}
{{- $models := list -}}
{{- $seen := dict -}}
{{- range $name, $pool := include "tandem.pools" . | fromJson -}}
{{- range $served := default (list $pool.model) $pool.servedModelName -}}
{{- if hasKey $seen $served -}}
{{- fail (printf "pools %s and %s both serve a model under the name %q; give one of them another servedModelName." (get $seen $served) $name $served) -}}
{{- end -}}
{{- $_ := set $seen $served $name -}}
{{- end -}}
{{- $model := dict
  "model" (default $pool.model $pool.tokenizer)
  "served_model_name" (default (list $pool.model) $pool.servedModelName)
  "discovery" $.Values.frontend.discovery
-}}
{{- $service := include "tandem.engineName" (dict "root" $ "pool" $name) -}}
{{- if eq $.Values.frontend.discovery "kubernetes" -}}
{{- $_ := set $model "engine_service" $service -}}
{{- else -}}
{{- $_ := set $model "engine_addresses" (list (printf "%s:5555" $service)) -}}
{{- end -}}
{{- if and $pool.revision (not $pool.tokenizer) }}{{ $_ := set $model "revision" $pool.revision }}{{ end -}}
{{- with $pool.reasoningParser }}{{ $_ := set $model "reasoning_parser" . }}{{ end -}}
{{- with $pool.toolCallParser }}{{ $_ := set $model "tool_call_parser" . }}{{ end -}}
{{- if $pool.chatTemplate }}{{ $_ := set $model "chat_template" (printf "/etc/tandem/chat-templates/%s.jinja" $name) }}{{ end -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- toRawJson $models -}}
{{- end -}}

{{/* Chat templates that pools give as text, as JSON: file name -> text. */}}
{{- define "tandem.chatTemplates" -}}
{{- $templates := dict -}}
{{- range $name, $pool := include "tandem.pools" . | fromJson -}}
{{- with $pool.chatTemplate }}{{ $_ := set $templates (printf "%s.jinja" $name) . }}{{ end -}}
{{- end -}}
{{- toRawJson $templates -}}
{{- end -}}

{{/*
The pools' caches that frontends mount, read-only, to find a tokenizer there, as JSON: mount path -> pool. Only a model
given as a path needs that; a name on the hub is fetched by each frontend (a few megabytes).
*/}}
{{- define "tandem.frontendCaches" -}}
{{- $caches := dict -}}
{{- $owners := dict -}}
{{- range $name, $pool := include "tandem.pools" . | fromJson -}}
{{- if and (hasPrefix "/" $pool.model) (not $pool.tokenizer) -}}
{{- $cache := $pool.modelCache -}}
{{- if has $cache.type (list "emptyDir" "claimPerEngine") -}}
{{- fail (printf "pools.%s: the model is the path %s, on a cache (modelCache.type %s) that frontends cannot see. Set tokenizer to a name on the hub or to a folder that frontend.extraVolumes mounts, or take another type of cache." $name $pool.model $cache.type) -}}
{{- end -}}
{{- $volume := include "tandem.cacheVolume" (dict "root" $ "pool" $name "cache" $cache) -}}
{{- if and (hasKey $caches $cache.mountPath) (ne (get $caches $cache.mountPath) $volume) -}}
{{- fail (printf "pools %s and %s keep models on different volumes at the same path %s, and frontends need both: give one of them another modelCache.mountPath." (get $owners $cache.mountPath) $name $cache.mountPath) -}}
{{- end -}}
{{- $_ := set $caches $cache.mountPath $volume -}}
{{- $_ := set $owners $cache.mountPath $name -}}
{{- end -}}
{{- end -}}
{{- toRawJson $caches -}}
{{- end -}}

{{- define "tandem.cacheClaimName" -}}
{{- include "tandem.objectName" (dict "root" .root "suffix" (printf "models-%s" .pool)) -}}
{{- end -}}

{{/* The volume source of a pool's cache, as YAML; nothing for claimPerEngine, whose claim template makes the volume. */}}
{{- define "tandem.cacheVolume" -}}
{{- $cache := .cache -}}
{{- if eq $cache.type "emptyDir" -}}
emptyDir:
  {{- with $cache.size }}
  sizeLimit: {{ . }}
  {{- else }} {}
  {{- end }}
{{- else if eq $cache.type "sharedClaim" -}}
persistentVolumeClaim:
  claimName: {{ include "tandem.cacheClaimName" (dict "root" .root "pool" .pool) }}
{{- else if eq $cache.type "existingClaim" -}}
persistentVolumeClaim:
  claimName: {{ $cache.claimName }}
{{- else if eq $cache.type "hostPath" -}}
hostPath:
  path: {{ $cache.hostPath }}
  type: DirectoryOrCreate
{{- else if eq $cache.type "image" -}}
image:
  reference: {{ $cache.image.reference }}
  pullPolicy: {{ $cache.image.pullPolicy }}
{{- end -}}
{{- end -}}

{{- define "tandem.cacheClaimSpec" -}}
accessModes:
  {{- toYaml .modes | nindent 2 }}
{{- with .cache.storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ default "50Gi" .cache.size }}
{{- end -}}
