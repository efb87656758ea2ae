package node

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// A library of the driver that cannot be used is named once when that begins and once when it ends. Without libcuda no
// device is healthy.
func TestBrokenLibraries(t *testing.T) {
	var log bytes.Buffer
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	b.start()
	if got := log.String(); strings.Contains(got, "driver library") {
		t.Fatalf("logged of a whole driver:\n%s", got)
	}
	library := func(name string) string {
		return filepath.Join(b.node.Root(), b.node.LibDir(), name+".so."+b.node.Driver())
	}
	optix := library("libnvoptix")
	whole, err := os.ReadFile(optix)
	testenv.Must(t, err)

	testenv.Must(t, os.Truncate(optix, 100))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.wantDevices(b.reconcile(), count{healthy: 4})
	if got := log.String(); strings.Count(got, "level=WARN") != 1 ||
		!strings.Contains(got, "library "+optix+", which cannot be used: ") {
		t.Errorf("a damaged library was not named once:\n%s", got)
	}
	log.Reset()
	testenv.Must(t, os.WriteFile(optix, whole, 0o755))
	b.wantDevices(b.reconcile(), count{healthy: 4})
	b.wantDevices(b.reconcile(), count{healthy: 4})
	const end = "no longer the case: containers do not get the driver library "
	if got := log.String(); strings.Count(got, end+optix) != 1 ||
		strings.Contains(got, "WARN") {
		t.Errorf("its end was not logged once:\n%s", got)
	}

	testenv.Must(t, os.Remove(library("libcuda")))
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	for uuid, reason := range reasons(s) {
		if !strings.Contains(reason, "no usable NVIDIA driver for compute") {
			t.Errorf("%s is unhealthy for the reason %q", uuid, reason)
		}
	}
}
