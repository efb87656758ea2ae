package metrics_test

import (
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/metrics"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestLeases(t *testing.T) {
	m := metrics.New()
	now := lease.Counts{}
	m.ObserveLeases(func() lease.Counts { return now })
	values := func() []string {
		text, err := m.Text()
		testenv.Must(t, err)
		return regexp.MustCompile(`(?m)^device_manager\S+ \S+$`).FindAllString(string(text), -1)
	}
	for _, c := range []struct {
		now  lease.Counts
		want []string
	}{
		{lease.Counts{}, []string{
			"device_manager_lease_device_seconds_total 0", "device_manager_leases 0", "device_manager_leases_waiting 0",
		}},
		{lease.Counts{Leases: 3, Waiting: 2, DeviceSeconds: 7.5}, []string{
			"device_manager_lease_device_seconds_total 7.5", "device_manager_leases 3", "device_manager_leases_waiting 2",
		}},
	} {
		now = c.now
		if diff := cmp.Diff(c.want, values()); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	}
}
