package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// AddClaims adds the metrics of the DRA driver. The function `prepared` returns the number of prepared claims. As in
// NVIDIA's DRA driver, each claim of a call counts as a request.
func (m *Metrics) AddClaims(prepared func() int) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: namespace, Name: "dra_prepared_claims", Help: "ResourceClaims that are prepared.",
	}, func() float64 {
		if m.cleared.Load() {
			return 0
		}
		return float64(prepared())
	}))
	for _, r := range []string{success, failure} {
		for _, operation := range []string{"prepare", "unprepare"} {
			m.claims.WithLabelValues(operation, r)
			m.claimTime.WithLabelValues(operation)
		}
		m.sliceWrites.WithLabelValues(r)
	}
}

// ClaimHandled counts a request to prepare or unprepare a claim.
func (m *Metrics) ClaimHandled(operation string, err error, took time.Duration) {
	m.claims.WithLabelValues(operation, result(err)).Inc()
	m.claimTime.WithLabelValues(operation).Observe(took.Seconds())
}

// SliceWritten counts a request that writes a ResourceSlice.
func (m *Metrics) SliceWritten(err error) { m.sliceWrites.WithLabelValues(result(err)).Inc() }
