// Package promtext writes metrics in the text format of Prometheus.
package promtext

import (
	"bytes"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
)

// ContentType is the content type of the text format, version 0.0.4.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Text returns all metrics of g, or the first error.
func Text(g prometheus.Gatherer) ([]byte, error) {
	families, err := g.Gather()
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
			return nil, err
		}
	}
	return text.Bytes(), nil
}
