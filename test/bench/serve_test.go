package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/proc"
)

// BenchmarkServe is P3 of the targets, for whole processes: from the start of a device plugin until the kubelet is asked to
// register it, and until it has the list of eight GPUs. The CDI spec is written every time. The floor is a Go program that
// opens the driver's library and ends; the peer is NVIDIA's plugin. More than half of what that takes is to read the 4,322
// lines of the driver's mig-minors, as many as on a real host, once for each GPU.
func BenchmarkServe(b *testing.B) {
	our, their := plugins(b, "dgx-h100")
	least := &variant{name: "a Go program that opens NVML", cmd: proc.Cmd{Args: floor(b, simtest.Node(b, "dgx-h100"))}}
	ours, theirs := startsOf("gpu-cdi-plugin", our), startsOf("nvidia-device-plugin", their)
	for b.Loop() {
		measure(b, rounds, []*variant{least, ours.listed, theirs.listed})
	}
	all := []*variant{least, ours.registered(), ours.listed, theirs.registered(), theirs.listed}
	logTable(b, "start of a device plugin, dgx-h100", all)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(least.median()), "floor-ms")
	for i, until := range []string{"registered", "list"} {
		our, their := all[1+i].median(), all[3+i].median()
		b.ReportMetric(ms(our), until+"-ms")
		b.ReportMetric(ms(their), "peer-"+until+"-ms")
		b.ReportMetric(float64(our)/float64(least.median()), until+"-x-floor")
		b.ReportMetric(float64(our)/float64(their), until+"-x-peer")
	}
}

// starts are those of a plugin, from which two things are measured at once.
type starts struct {
	listed *variant
	asked  []time.Duration
}

func startsOf(name string, s *serving) *starts {
	both := &starts{listed: &variant{name: name + ", until it is listed"}}
	both.listed.prepare = func() error {
		s.end()
		return nil
	}
	both.listed.run = func() time.Duration {
		registered, listed := s.start()
		both.asked = append(both.asked, registered)
		return listed
	}
	return both
}

// registered are the same runs, until the kubelet was asked; the first of them does not count.
func (s *starts) registered() *variant {
	return &variant{name: strings.Replace(s.listed.name, "listed", "registered", 1), times: s.asked[1:]}
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
