package driver

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNumbersOfDeviceNodes(t *testing.T) {
	const (
		now = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n509 nvidia-caps-imex-channels\n510 nvidia-caps\n" +
			"511 nvidia-uvm\n\nBlock devices:\n250 nvidia-uvm\n"
		old   = "Character devices:\n195 nvidia-frontend\n234 nvidia-uvm\n"
		noUVM = "Character devices:\n195 nvidia\n"
	)
	for name, c := range map[string]struct {
		devices      string // /proc/devices
		node         string
		major, minor uint32
		want         string // the number that it should have, or "" if it is right or unknown
	}{
		"a GPU":                                {now, "nvidia3", 195, 3, ""},
		"the node of another GPU":              {now, "nvidia3", 195, 4, "195:3"},
		"a GPU by a node of another driver":    {now, "nvidia0", 1, 3, "195:0"},
		"the control device":                   {now, "nvidiactl", 195, 255, ""},
		"a GPU in place of the control device": {now, "nvidiactl", 195, 0, "195:255"},
		"unified memory":                       {now, "nvidia-uvm", 511, 0, ""},
		"unified memory from before a reboot":  {now, "nvidia-uvm", 250, 0, "511:0"},
		"unified memory's tools":               {now, "nvidia-uvm-tools", 511, 0, "511:1"},
		"unified memory without its module": {
			noUVM, "nvidia-uvm", 511, 0, "none",
		},
		"a MIG instance":                       {now, "nvidia-caps/nvidia-cap12", 510, 12, ""},
		"a MIG instance by another one's node": {now, "nvidia-caps/nvidia-cap12", 510, 11, "510:12"},
		"an IMEX channel from before a reboot": {
			now, "nvidia-caps-imex-channels/channel2", 240, 2, "509:2",
		},
		"an older driver's GPU":           {old, "nvidia1", 195, 1, ""},
		"an older driver's wrong GPU":     {old, "nvidia1", 195, 0, "195:1"},
		"no driver is loaded":             {"Character devices:\n  1 mem\n", "nvidia0", 1, 3, ""},
		"no /proc/devices":                {"", "nvidia0", 1, 3, ""},
		"a driver that has no number":     {now, "gdrdrv", 1, 3, ""},
		"a name that is not in the table": {now, "nvidia0.old", 1, 3, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			if c.devices != "" {
				r.file("/proc/devices", c.devices, 0o444)
			}
			got := ""
			numbers := ReadNumbers(r.host())
			for _, path := range []string{"/dev/" + c.node, "/srv/dev/root/dev/" + c.node} {
				if err := numbers.CheckPath(path, unix.Mkdev(c.major, c.minor)); err != nil {
					got = err.Error()
				}
				want := ""
				if c.want != "" {
					want = fmt.Sprintf("its number is %d:%d, and that of its device is %s", c.major, c.minor, c.want)
				}
				if c.want == "none" {
					want = "its number is 511:0, which no driver has, since its kernel module is not loaded"
				}
				if got != want {
					t.Errorf("%s: got %q, want %q", path, got, want)
				}
			}
		})
	}
}
