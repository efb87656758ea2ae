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
app.kubernetes.io/name: {{ include "gpu-cdi-plugin.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
{{- end -}}

{{- define "gpu-cdi-plugin.labels" -}}
{{ include "gpu-cdi-plugin.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "-" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* The configuration of the nodes without the label, by the rules of NVIDIA's chart. */}}
{{- define "gpu-cdi-plugin.defaultConfig" -}}
{{- if .Values.config.default -}}
{{- .Values.config.default -}}
{{- else if hasKey .Values.config.map "default" -}}
default
{{- else if eq (len .Values.config.map) 1 -}}
{{- keys .Values.config.map | first -}}
{{- end -}}
{{- end -}}

{{/* The API server refuses maxSurge beside maxUnavailable, and a file of values that sets this one does not unset the
default of the other. */}}
{{- define "gpu-cdi-plugin.updateStrategy" -}}
{{- $strategy := deepCopy .Values.updateStrategy -}}
{{- $rolling := default dict $strategy.rollingUpdate -}}
{{- if not (has (toString (default 0 $rolling.maxUnavailable)) (list "0" "0%")) -}}
{{- $_ := set $strategy "rollingUpdate" (omit $rolling "maxSurge") -}}
{{- end -}}
{{ toYaml $strategy }}
{{- end -}}

{{/* The affinity of the pods that have a configuration: that of the values, and the node's choice. */}}
{{- define "gpu-cdi-plugin.affinity" -}}
{{- $root := .root -}}
{{- $choice := list -}}
{{- if .config -}}
{{- $choice = list (dict "key" "nvidia.com/device-plugin.config" "operator" "In" "values" (list .config)) -}}
{{- else -}}
{{- with without (keys $root.Values.config.map | sortAlpha) (include "gpu-cdi-plugin.defaultConfig" $root) -}}
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

{{/* Whether the plugin calls the API server. */}}
{{- define "gpu-cdi-plugin.callsAPI" -}}
{{- if or .Values.reportHealth .Values.dra.enabled -}}true{{- end -}}
{{- end -}}

{{/* The arguments of serve, in each of its two places. */}}
{{- define "gpu-cdi-plugin.serveArguments" -}}
- {{ printf "--device-plugin-dir=%s/device-plugins" .Values.kubeletRootDir | quote }}
{{- with .Values.migStrategy }}
- {{ printf "--mig-strategy=%s" . | quote }}
{{- end }}
{{- with .Values.deviceListStrategy }}
- {{ printf "--strategy=%s" (kindIs "string" . | ternary . (join "," .)) | quote }}
{{- end }}
{{- with .Values.deviceIDStrategy }}
- {{ printf "--device-id-strategy=%s" . | quote }}
{{- end }}
{{- with .Values.nvidiaDriverRoot }}
- {{ printf "--driver-root=%s" . | quote }}
{{- end }}
{{- $extras := list }}
{{- if .Values.gdsEnabled }}{{ $extras = append $extras "gds" }}{{ end }}
{{- if .Values.gdrcopyEnabled }}{{ $extras = append $extras "gdrcopy" }}{{ end }}
{{- if .Values.mofedEnabled }}{{ $extras = append $extras "mofed" }}{{ end }}
{{- with $extras }}
- {{ printf "--extras=%s" (join "," .) | quote }}
{{- end }}
{{- if .Values.metrics.pods }}
- --pod-metrics
{{- end }}
{{- if .Values.gfd.enabled }}
- --node-labels
{{- end }}
{{- with .Values.reportHealth }}
- {{ printf "--report-health=%s" (join "," .) | quote }}
{{- end }}
{{- with .Values.door }}
- {{ printf "--door=%s" . | quote }}
{{- end }}
{{- if .Values.dra.enabled }}
- {{ printf "--plugins-registry-dir=%s/plugins_registry" .Values.kubeletRootDir | quote }}
{{- end }}
{{- if include "gpu-cdi-plugin.callsAPI" . }}
# The program sees the volume where the kubelet has it on the node.
- {{ printf "--service-account-dir=%s/pods/$(POD_UID)/volumes/kubernetes.io~projected/api-access" .Values.kubeletRootDir | quote }}
{{- end }}
{{- end -}}
