package endpoint

import (
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// repeat returns a message with n fields, each a message.
func repeat(field byte, value string, n int) string {
	if len(value) >= 0x80 {
		panic("too long for a length of one byte")
	}
	return strings.Repeat(string([]byte{field<<3 | 2, byte(len(value))})+value, n)
}

func TestListsWithTooManyElementsAreRefused(t *testing.T) {
	nodes := repeat(3, repeat(1, "", 49), 1) // a topology with 49 nodes: 50 elements
	tests := map[string]struct {
		list string
		ok   bool
	}{
		"as many empty devices as may be":     {repeat(1, "", 500_000), true},
		"one more":                            {repeat(1, "", 500_001), false},
		"64 MiB of empty devices":             {repeat(1, "", 32<<20), false},
		"as many NUMA nodes as may be":        {repeat(1, nodes, 9_803), true},
		"more NUMA nodes":                     {repeat(1, nodes, 9_804), false},
		"many fields that nothing is made of": {repeat(9, "", 600_000), true},
	}
	for what, test := range tests {
		t.Run(what, func(t *testing.T) {
			var list v1beta1.ListAndWatchResponse
			half := len(test.list) / 2 // a large message comes in several buffers
			err := newListCodec().Unmarshal(mem.BufferSlice{
				mem.SliceBuffer(test.list[:half]), mem.SliceBuffer(test.list[half:]),
			}, &list)
			if test.ok != (err == nil) || !test.ok && len(list.GetDevices()) != 0 {
				t.Errorf("%d devices, %v", len(list.GetDevices()), err)
			}
		})
	}
}

func FuzzCountElements(f *testing.F) {
	for _, devices := range [][]*v1beta1.Device{nil, plugintest.Devices(3), {plugintest.Device("a", true, 0, 1)}} {
		data, err := proto.Marshal(&v1beta1.ListAndWatchResponse{Devices: devices})
		testenv.Must(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		n := countElements(data, 1, 3, 1)
		var list v1beta1.ListAndWatchResponse
		if proto.Unmarshal(data, &list) != nil {
			return
		}
		made := len(list.GetDevices())
		for _, d := range list.GetDevices() {
			made += len(d.GetTopology().GetNodes())
		}
		if n < made {
			t.Errorf("counted %d, and decoding makes %d", n, made)
		}
	})
}
