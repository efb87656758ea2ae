package endpoint_test

import (
	"testing"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestAListReplacesTheOneBefore(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	p.SetDevices(plugintest.Device("x", true), plugintest.Device("y", false))
	b.waitFor(gpu, "1/2")
	p.SetDevices()
	b.waitFor(gpu, "0/0")
	p.Stop()
	b.wait(gpu, "disconnected", func(r report) bool { return !r.Connected })
}
