package config

import (
	"strings"
	"testing"
)

func TestPathsOfSocketsHaveTheLengthThatTheKernelAllows(t *testing.T) {
	name := func(size int) string { return "/" + strings.Repeat("x", size-1) }
	for what, c := range map[string]struct {
		change func(*Manager)
		want   string // of the error; empty means none
	}{
		"107 bytes": {func(m *Manager) { m.APISocket, m.PodResourcesSocket = name(107), "/d"+name(105) }, ""},
		"108 bytes for the API": {
			func(m *Manager) { m.APISocket = name(108) }, `api-socket "` + name(108) + `": it has 108 bytes, and at most 107`,
		},
		"108 bytes for PodResources": {
			func(m *Manager) { m.PodResourcesSocket = name(108) }, "it has 108 bytes, and at most 107",
		},
		"a directory of 94 bytes": {func(m *Manager) { m.SocketDir = name(94) }, ""},
		"a directory of 95 bytes": {func(m *Manager) { m.SocketDir = name(95) }, "it has 95 bytes, and at most 94"},
	} {
		c0 := Default()
		c.change(&c0.Manager)
		if err := c0.Validate(); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", what, err, c.want)
		}
	}
}
