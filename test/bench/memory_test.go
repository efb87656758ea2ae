package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkMemory measures the memory of a plugin while it serves eight GPUs, each of which was allocated, and the size
// of its program. "anonymous" is RssAnon, "cgroup" the usage of a memory cgroup of its own less file cache. Each is the
// median over more than a minute, in which this project's plugin reconciles the node twice. "cpu" is the processor time
// that it uses meanwhile. The floor is a Go program that has opened the driver's library.
func BenchmarkMemory(b *testing.B) {
	const samples = 70
	node := drivers["with MIG minors"](b)
	all := newPlugins(b, node)
	program, library := floorProgram(b, node)
	waiting := startWaiting(b, "wait", program, library)
	anonymous, cgroup := map[*plugin][]float64{}, map[*plugin][]float64{}
	for i, p := range all {
		p.cgroup = makeMemoryCgroup(b, fmt.Sprintf("gpu-bench-%d-%d", os.Getpid(), i))
		b.Cleanup(p.stop) // before the cgroup is removed
		p.start()
		for _, id := range p.ids() {
			if _, err := p.allocate(id); err != nil {
				b.Fatal(err)
			}
		}
	}
	used := map[*plugin]float64{}
	for b.Loop() {
		for _, p := range all {
			used[p] = processorTime(b, p.process.Pid())
		}
		for range samples {
			time.Sleep(time.Second)
			for _, p := range all {
				anonymous[p] = append(anonymous[p], rssAnon(b, p.process.Pid()))
				if p.cgroup != "" {
					cgroup[p] = append(cgroup[p], cgroupUsage(b, p.cgroup))
				}
			}
		}
		for _, p := range all {
			used[p] = processorTime(b, p.process.Pid()) - used[p]
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(rssAnon(b, waiting), floor+"anonymous-MB")
	theirs := all[len(all)-1]
	for _, p := range all {
		info, err := os.Stat(p.program)
		testenv.Must(b, err)
		b.ReportMetric(float64(info.Size())/1e6, p.prefix+"binary-MB")
		b.ReportMetric(median(anonymous[p]), p.prefix+"anonymous-MB")
		b.ReportMetric(slices.Max(anonymous[p]), p.prefix+"anonymous-most-MB")
		b.ReportMetric(used[p]*60/samples, p.prefix+"cpu-s/min")
		if len(cgroup[p]) > 0 {
			b.ReportMetric(median(cgroup[p]), p.prefix+"cgroup-MB")
		}
		if p != theirs {
			b.ReportMetric(median(anonymous[p])/median(anonymous[theirs]), p.prefix+"anonymous-x-peer")
		}
	}
}

// startWaiting starts the floor, which does this until the end of its input, and returns its process ID.
func startWaiting(b *testing.B, what, program, library string) (pid int) {
	b.Helper()
	r, w, err := os.Pipe()
	testenv.Must(b, err)
	p, err := proc.Start(proc.Cmd{Args: []string{program, library, what}, Stdin: r}, os.Stderr)
	testenv.Must(b, err)
	_ = r.Close()
	b.Cleanup(func() {
		_ = w.Close()
		<-p.Done()
	})
	return p.Pid()
}

// rssAnon is a process's anonymous resident memory in megabytes; see proc_pid_status(5).
func rssAnon(b *testing.B, pid int) float64 {
	b.Helper()
	return field(b, fmt.Sprintf("/proc/%d/status", pid), "RssAnon:") * 1024 / 1e6
}

// processorTime is how long processors have worked for a process, in seconds; see proc_pid_stat(5).
func processorTime(b *testing.B, pid int) float64 {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	testenv.Must(b, err)
	var user, system float64
	_, afterName, _ := strings.Cut(string(data), ") ")
	for i, to := range map[int]*float64{11: &user, 12: &system} {
		if *to, err = strconv.ParseFloat(strings.Fields(afterName)[i], 64); err != nil {
			b.Fatal(err)
		}
	}
	const ticks = 100 // a second, on all common machines
	return (user + system) / ticks
}

// makeMemoryCgroup makes a memory cgroup, of version 2 or 1, until the end of the benchmark. It returns its directory,
// or an empty string where the machine has no memory controller.
func makeMemoryCgroup(b *testing.B, name string) string {
	b.Helper()
	for _, dir := range []string{"/sys/fs/cgroup/memory/" + name, "/sys/fs/cgroup/" + name} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			continue
		}
		b.Cleanup(func() { _ = os.Remove(dir) })
		if _, _, err := usageFiles(dir); err == nil {
			return dir
		}
	}
	b.Log("no cgroup-MB: the machine has no memory controller for cgroups")
	return ""
}

// usageFiles are a memory cgroup's usage and the name in memory.stat of the file cache in it; see cgroup-v2.rst and
// cgroup-v1/memory.rst in the kernel's documentation.
func usageFiles(dir string) (usage, cache string, err error) {
	for usage, cache := range map[string]string{"memory.current": "file", "memory.usage_in_bytes": "cache"} {
		if _, err := os.Stat(filepath.Join(dir, usage)); !errors.Is(err, fs.ErrNotExist) {
			return filepath.Join(dir, usage), cache, err
		}
	}
	return "", "", fs.ErrNotExist
}

// cgroupUsage is the memory in megabytes that a cgroup uses, less file cache.
func cgroupUsage(b *testing.B, dir string) float64 {
	b.Helper()
	usage, cache, err := usageFiles(dir)
	testenv.Must(b, err)
	data, err := os.ReadFile(usage)
	testenv.Must(b, err)
	bytes, err := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
	testenv.Must(b, err)
	return (bytes - field(b, filepath.Join(dir, "memory.stat"), cache)) / 1e6
}

// field is the number after a name at the beginning of a line.
func field(b *testing.B, path, name string) float64 {
	b.Helper()
	data, err := os.ReadFile(path)
	testenv.Must(b, err)
	for line := range strings.Lines(string(data)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == name {
			value, err := strconv.ParseFloat(words[1], 64)
			testenv.Must(b, err)
			return value
		}
	}
	b.Fatalf("%s has no %s", path, name)
	return 0
}
