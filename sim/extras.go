package sim

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/exit"
)

// uverbsMinor is the minor of the first InfiniBand adapter's node for user-space verbs, and rdmaCMMinor one of those that
// the kernel gives to misc devices when they are loaded.
const (
	uverbsMinor = 192
	rdmaCMMinor = 58
)

// adapters is how many InfiniBand adapters a node has that has some.
const adapters = 2

// imexChannels is how many IMEX channels a node has that has some.
const imexChannels = 2

// extras are what a node may have besides its GPUs. NVSwitches are not among them: a machine has them or not.
var extras = map[string]func(plan){
	"gdrcopy": func(p plan) { p.node("dev/gdrdrv", majorGDRCopy, 0, 0o666) },
	"gds": func(p plan) {
		for i := range 16 {
			p.node("dev/nvidia-fs"+strconv.Itoa(i), majorGDS, uint32(i), 0o666)
		}
		p.dir("run/udev/data")
		p.file("etc/cufile.json", "{\"properties\": {\"use_compat_mode\": true}}\n")
	},
	"imex": func(p plan) {
		for i := range imexChannels {
			p.node("dev/nvidia-caps-imex-channels/channel"+strconv.Itoa(i), majorIMEX, uint32(i), 0o666)
		}
	},
	"mofed": func(p plan) {
		for i := range adapters {
			p.node("dev/infiniband/uverbs"+strconv.Itoa(i), majorInfiniBand, uverbsMinor+uint32(i), 0o666)
		}
		p.node("dev/infiniband/rdma_cm", majorMisc, rdmaCMMinor, 0o666)
	},
}

// Extras lists what Options.Extras may have: "gdrcopy", "gds", "imex", "mofed".
func Extras() []string { return slices.Sorted(maps.Keys(extras)) }

func checkExtras(names []string) error {
	for _, name := range names {
		if extras[name] == nil {
			return exit.With(exit.Usage, "", fmt.Errorf("unknown extra %q; known are %s", name, strings.Join(Extras(), ", ")))
		}
	}
	return nil
}

func extraFiles(names []string) plan {
	p := plan{}
	for _, name := range names {
		extras[name](p)
	}
	return p
}
