package bench

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkPreStart measures PreStartContainer with the policy check, for one idle GPU. The floor reads the same of the
// driver, in a program of its own. A call of the simulated driver takes no time, or as long as one of a real driver.
// Outside the host's PID namespace a check leaves out processes and memory, and is then shorter than the floor.
func BenchmarkPreStart(b *testing.B) {
	for _, latency := range []time.Duration{0, 50 * time.Microsecond} {
		b.Run("latency="+latency.String(), func(b *testing.B) { benchmarkPreStart(b, latency) })
	}
}

func benchmarkPreStart(b *testing.B, latency time.Duration) {
	b.Helper()
	const rounds = 200
	node := drivers["with MIG minors"](b)
	all := newPlugins(b, node)
	all = all[:len(all)-1] // NVIDIA's does nothing before containers
	program, library := floorProgram(b, node)
	for _, p := range all {
		p.start()
	}
	testenv.Must(b, node.SetLatency(latency))
	uuid := node.Machine().GPUs[3].UUID
	contenders := []*contender{{
		name: "the driver's answers alone", prefix: floor, run: startChecking(b, program, library, uuid),
	}}
	request := &v1beta1.PreStartContainerRequest{DevicesIds: []string{uuid}}
	for _, p := range all {
		contenders = append(contenders, &contender{
			name: p.cmd.Args[0], prefix: p.prefix,
			run: func() []time.Duration {
				begin := time.Now()
				if _, err := p.client.PreStartContainer(b.Context(), request); err != nil {
					b.Fatal(err)
				}
				return []time.Duration{time.Since(begin)}
			},
		})
	}
	for b.Loop() {
		compare(b, rounds, []string{"answered"}, contenders)
	}
	reportTimes(b, 0, "check-", contenders)
	for _, c := range contenders[1:] {
		b.ReportMetric(ms(median(c.times[0])-median(contenders[0].times[0])), c.prefix+"check-beside-floor-ms")
	}
}

// startChecking starts the floor. The function has it read what a check needs, and returns how long that took.
func startChecking(b *testing.B, program, library, uuid string) func() []time.Duration {
	b.Helper()
	in, ask, err := os.Pipe()
	testenv.Must(b, err)
	out, write, err := os.Pipe()
	testenv.Must(b, err)
	p, err := proc.Start(proc.Cmd{Args: []string{program, library, "check", uuid}, Stdin: in}, write)
	testenv.Must(b, err)
	_, _ = in.Close(), write.Close()
	b.Cleanup(func() {
		_ = ask.Close()
		p.Code()
	})
	lines := bufio.NewReader(out)
	return func() []time.Duration {
		if _, err := io.WriteString(ask, "\n"); err != nil {
			b.Fatal(err)
		}
		line, err := lines.ReadString('\n')
		testenv.Must(b, err)
		ns, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		if err != nil {
			b.Fatal(fmt.Errorf("the floor printed %q: %w", line, err))
		}
		return []time.Duration{time.Duration(ns)}
	}
}
