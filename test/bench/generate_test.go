package bench

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/proc"
)

// BenchmarkGenerate measures the generation of a CDI spec for 8 GPUs and about 50 driver files, the whole process, to
// standard output, beside nvidia-ctk. All have the simulated node as their root. The floor is a Go program that opens
// the driver's library and exits.
func BenchmarkGenerate(b *testing.B) {
	for name, node := range drivers {
		b.Run(name, func(b *testing.B) {
			n := node(b)
			program, library := floorProgram(b, n)
			inNode := func(args ...string) func() []time.Duration {
				return commandRun(b, proc.Cmd{Args: args, Chroot: n.Root(), Env: []string{"PATH=/usr/sbin:/usr/bin"}})
			}
			var all []*contender
			for _, build := range install(b, n.Root(), program, shared.Peer(b, "nvidia-ctk")) {
				all = append(all, &contender{
					name: build.name, prefix: build.prefix,
					run: inNode("/usr/bin/"+build.name, "--hook-path", "/usr/bin/prestart-hook", "cdi", "generate"),
				})
			}
			all = append(all,
				&contender{
					name: "a Go program that opens NVML", prefix: floor,
					run: inNode("/usr/bin/"+filepath.Base(program), strings.TrimPrefix(library, n.Root())),
				},
				&contender{name: "nvidia-ctk", prefix: peer, run: inNode("/usr/bin/nvidia-ctk", "cdi", "generate")})
			for b.Loop() {
				compare(b, rounds, []string{"end"}, all)
			}
			reportTimes(b, 0, "", all)
		})
	}
}
