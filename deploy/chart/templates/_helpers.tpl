{{- define "gpu-cdi-plugin.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gpu-cdi-plugin.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "gpu-cdi-plugin.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "gpu-cdi-plugin.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gpu-cdi-plugin.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "gpu-cdi-plugin.image" -}}
{{- printf "%s:%s" .Values.image.repository (default (.Chart.AppVersion | replace "+" "-") .Values.image.tag) -}}
{{- end -}}

{{- define "gpu-cdi-plugin.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride -}}
{{ toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ include "gpu-cdi-plugin.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "gpu-cdi-plugin.labels" -}}
{{ include "gpu-cdi-plugin.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "-" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* The affinity of the pods that have a configuration: that of the values, and the node's choice. */}}
{{- define "gpu-cdi-plugin.affinity" -}}
{{- $root := .root -}}
{{- $choice := list -}}
{{- if .config -}}
{{- $choice = list (dict "key" "nvidia.com/device-plugin.config" "operator" "In" "values" (list .config)) -}}
{{- else -}}
{{- with without (keys $root.Values.config.map | sortAlpha) $root.Values.config.default -}}
{{- $choice = list (dict "key" "nvidia.com/device-plugin.config" "operator" "NotIn" "values" .) -}}
{{- end -}}
{{- end -}}
{{- $affinity := deepCopy (default dict $root.Values.affinity) -}}
{{- if $choice -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $required := default dict $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := list -}}
{{- range default (list (dict)) $required.nodeSelectorTerms -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (concat (default list .matchExpressions) $choice)) .) -}}
{{- end -}}
{{- $required = merge (dict "nodeSelectorTerms" $terms) $required -}}
{{- $node = merge (dict "requiredDuringSchedulingIgnoredDuringExecution" $required) $node -}}
{{- $affinity = merge (dict "nodeAffinity" $node) $affinity -}}
{{- end -}}
{{ toYaml $affinity }}
{{- end -}}
