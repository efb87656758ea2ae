package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
)

// BenchmarkServe is P3 of the targets, for whole processes: from the start of a device plugin until the kubelet is asked to
// register it, until it has the list of eight GPUs, and until it was told, when it asked at once, which GPUs are best
// connected. That first answer has to be right each time. The CDI spec is written every time. The floor is a Go program
// that opens the driver's library and ends; the peer is NVIDIA's plugin. On dgx-h100 more than half of what that takes is to
// read the 4,322 lines of the driver's mig-minors, as many as on a real host, once for each GPU; on dgx1-v100 there are none.
func BenchmarkServe(b *testing.B) {
	for _, machine := range []string{"dgx-h100", "dgx1-v100"} {
		b.Run(machine, func(b *testing.B) { benchmarkServe(b, machine) })
	}
}

func benchmarkServe(b *testing.B, machine string) {
	our, their := plugins(b, machine)
	if machine == "dgx1-v100" {
		if err := os.Remove(filepath.Join(our.cmd.Chroot, "proc/driver/nvidia-caps/mig-minors")); err != nil {
			b.Fatal(err)
		}
	}
	least := &variant{name: "a Go program that opens NVML", cmd: proc.Cmd{Args: floor(b, simtest.Node(b, machine))}}
	ours, theirs := startsOf("gpu-cdi-plugin", our), startsOf("nvidia-device-plugin", their)
	for b.Loop() {
		measure(b, rounds, []*variant{least, ours.preferred, theirs.preferred})
	}
	all := []*variant{least}
	for _, s := range []*starts{ours, theirs} {
		all = append(all, s.until("registered", s.asked), s.until("listed", s.listed), s.preferred)
	}
	logTable(b, "start of a device plugin, "+machine, all)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(least.median()), "floor-ms")
	for i, until := range []string{"registered", "list", "preferred"} {
		our, their := all[1+i].median(), all[4+i].median()
		b.ReportMetric(ms(our), until+"-ms")
		b.ReportMetric(ms(their), "peer-"+until+"-ms")
		b.ReportMetric(float64(our)/float64(least.median()), until+"-x-floor")
		b.ReportMetric(float64(our)/float64(their), until+"-x-peer")
	}
}

// starts are those of a plugin, from which three things are measured at once.
type starts struct {
	name          string
	preferred     *variant
	asked, listed []time.Duration
}

func startsOf(name string, s *serving) *starts {
	all := &starts{name: name, preferred: &variant{name: name + ", until it preferred the right GPUs"}}
	all.preferred.prepare = func() error {
		s.end()
		return nil
	}
	all.preferred.run = func() time.Duration {
		registered, listed := s.start()
		s.prefersTheBest()
		all.asked, all.listed = append(all.asked, registered), append(all.listed, listed)
		return time.Since(s.begun)
	}
	return all
}

// until are the same runs, until something else; the first of them does not count.
func (s *starts) until(what string, times []time.Duration) *variant {
	return &variant{name: s.name + ", until it is " + what, times: times[1:]}
}

// BenchmarkMemory is P5 of the targets: what a plugin holds while it serves, and the size of its program. Each GPU was
// allocated; then both run for a minute and more, in which ours looks at the node twice, and the median is what a plugin
// usually holds. Of the resident memory, what is mapped from files (the program itself, libraries) is there once for all
// processes and can be dropped at any time; the rest is the process's own. The floor is a Go program that has opened the
// driver's library; the peer is NVIDIA's plugin.
func BenchmarkMemory(b *testing.B) {
	const samples = 75
	our, their := plugins(b, "dgx-h100")
	least, end := waiting(b, floor(b, simtest.Node(b, "dgx-h100")))
	defer end()
	var ours, theirs memory
	for b.Loop() {
		for _, s := range []*serving{our, their} {
			s.start()
			for _, id := range s.ids() {
				if _, err := s.allocate(id); err != nil {
					b.Fatal(err)
				}
			}
		}
		for range samples {
			time.Sleep(time.Second)
			ours.sample(b, our)
			theirs.sample(b, their)
		}
	}
	floorOwn, floorFiles := resident(b, least.Pid())
	b.ReportMetric(0, "ns/op")
	ours.report(b, "")
	theirs.report(b, "peer-")
	b.ReportMetric(floorOwn+floorFiles, "floor-MB")
	b.ReportMetric(median(ours.all)/(floorOwn+floorFiles), "x-floor")
	b.ReportMetric(median(ours.all)/median(theirs.all), "x-peer")
	b.ReportMetric(size(b, our), "binary-MB")
	b.ReportMetric(size(b, their), "peer-binary-MB")
}

// memory is what a plugin held, in megabytes, each time that it was looked at.
type memory struct{ own, files, all []float64 }

func (m *memory) sample(b *testing.B, s *serving) {
	b.Helper()
	own, files := resident(b, s.process.Pid())
	m.own, m.files, m.all = append(m.own, own), append(m.files, files), append(m.all, own+files)
}

func (m *memory) report(b *testing.B, prefix string) {
	b.ReportMetric(median(m.own), prefix+"own-MB")
	b.ReportMetric(median(m.files), prefix+"file-MB")
	b.ReportMetric(median(m.all), prefix+"resident-MB")
	b.ReportMetric(slices.Max(m.all), prefix+"most-MB")
}

// size is that of a plugin's program, in megabytes.
func size(b *testing.B, s *serving) float64 {
	b.Helper()
	info, err := os.Stat(s.program)
	if err != nil {
		b.Fatal(err)
	}
	return float64(info.Size()) / 1e6
}

// waiting starts a program that waits for the end of its input. The function that it returns ends it.
func waiting(b *testing.B, args []string) (p *proc.Process, end func()) {
	b.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	p, err = proc.Start(proc.Cmd{Args: append(args, "wait"), Stdin: r}, os.Stderr)
	if err != nil {
		b.Fatal(err)
	}
	_ = r.Close()
	return p, func() {
		_ = w.Close()
		<-p.Done()
	}
}

// resident is the memory of a process in megabytes: its own, and what is mapped from files. See proc_pid_status(5).
func resident(b *testing.B, pid int) (own, files float64) {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	var kilobytes float64
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		if _, err := fmt.Sscanf(value, "%f kB", &kilobytes); err != nil {
			continue
		}
		switch name {
		case "RssAnon":
			own = kilobytes * 1024 / 1e6
		case "RssFile", "RssShmem":
			files += kilobytes * 1024 / 1e6
		}
	}
	return own, files
}
