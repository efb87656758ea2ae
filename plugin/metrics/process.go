package metrics

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// started is when the process did, but for the milliseconds that came before the program's own code.
var started = time.Now()

// writeProcess writes what Prometheus' clients tell of every process, under their names. What cannot be read is left out.
func writeProcess(b *bytes.Buffer) {
	write := func(name, kind, help string, value float64) {
		fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
		sample(b, name, "", value)
	}
	write("process_start_time_seconds", "gauge", "When the process started, since the Unix epoch.", float64(started.UnixMilli())/1e3)
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &used) == nil {
		write("process_cpu_seconds_total", "counter", "Time on processors, in user and system mode.",
			time.Duration(used.Utime.Nano()+used.Stime.Nano()).Seconds())
	}
	if all, resident, err := memory(); err == nil {
		write("process_virtual_memory_bytes", "gauge", "Addresses in use.", all)
		write("process_resident_memory_bytes", "gauge", "Memory in use, files of the program included.", resident)
	}
	if open, err := os.ReadDir("/proc/self/fd"); err == nil {
		write("process_open_fds", "gauge", "File descriptors that are open.", float64(len(open)-1)) // one was for this
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		write("process_max_fds", "gauge", "File descriptors that may be open.", float64(limit.Cur))
	}
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	write("go_memstats_heap_alloc_bytes", "gauge", "Memory of objects on the heap.", float64(stats.HeapAlloc))
	write("go_goroutines", "gauge", "Goroutines that exist.", float64(runtime.NumGoroutine()))
}

// memory is the size of the process in bytes, proc_pid_statm(5).
func memory() (all, resident float64, err error) {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &all, &resident); err != nil {
		return 0, 0, err
	}
	page := float64(os.Getpagesize())
	return all * page, resident * page, nil
}
