package cluster

import (
	"fmt"
	"testing"
)

// TestConflicts says which containers must not run at the same time.
func TestConflicts(t *testing.T) {
	whole, first, second := part{}, part{mig: []int{13}, layout: "3g,3g"}, part{mig: []int{22}, layout: "3g,3g"}
	with := func(uid string, gpus map[int]part) *holder { return &holder{uid: uid, gpus: gpus} }
	sharing := func(uid string) *holder { return &holder{uid: uid, shares: true, gpus: map[int]part{0: whole}} }
	for name, test := range map[string]struct {
		a, b *holder
		want []int
	}{
		"different GPUs": {with("a", map[int]part{0: whole}), with("b", map[int]part{1: whole}), nil},
		"GPUs in common": {
			with("a", map[int]part{0: whole, 2: whole, 3: whole}), with("b", map[int]part{2: whole, 0: whole}), []int{0, 2},
		},
		"one pod":             {with("a", map[int]part{0: whole}), with("a", map[int]part{0: whole}), nil},
		"shares":              {sharing("a"), sharing("b"), nil},
		"a share and a GPU":   {sharing("a"), with("b", map[int]part{0: whole}), []int{0}},
		"MIG devices":         {with("a", map[int]part{0: first}), with("b", map[int]part{0: second}), nil},
		"one MIG device":      {with("a", map[int]part{0: first}), with("b", map[int]part{0: first}), []int{0}},
		"a MIG device, a GPU": {with("a", map[int]part{0: first}), with("b", map[int]part{0: whole}), []int{0}},
		"a MIG device of an earlier layout": {
			with("a", map[int]part{0: first}), with("b", map[int]part{0: {mig: []int{67}, layout: "1g"}}), []int{0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, got := range [][]int{conflicts(test.a, test.b), conflicts(test.b, test.a)} {
				if fmt.Sprint(got) != fmt.Sprint(test.want) {
					t.Errorf("the conflicts are %v, want %v", got, test.want)
				}
			}
		})
	}
}

// TestPartsOfDeviceNodes reads the device nodes of a container.
func TestPartsOfDeviceNodes(t *testing.T) {
	o := &Oracle{migMinors: map[int]int{13: 0, 22: 0, 139: 1}, layouts: map[int]string{0: "3g,3g"}}
	got := o.parts([]string{
		"/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13",
		"/dev/nvidia1", "/dev/nvidia-uvm", "/dev/null",
	}, "")
	if want := "map[0:MIG [13] of 3g,3g 1:whole]"; fmt.Sprint(got) != want {
		t.Errorf("they are %v, want %s", got, want)
	}
}
