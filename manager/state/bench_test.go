package state

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// BenchmarkPut adds a pod beside N others. It reports the medians of that and of a write with one fdatasync of the same
// size, taken in turn, and what was written for each pod.
func BenchmarkPut(b *testing.B) {
	for _, n := range []int{8, 128, 1000, 10_000} {
		b.Run(fmt.Sprintf("placed=%d", n), func(b *testing.B) {
			dir := b.TempDir()
			s := fillTest(b, filepath.Join(dir, "state.db"), n)
			raw, err := os.Create(filepath.Join(dir, "raw"))
			if err != nil {
				b.Fatal(err)
			}
			defer raw.Close()
			var puts, syncs []time.Duration
			var bytes int
			for i := 0; b.Loop(); i++ {
				p := testPlacement(n + i)
				before, start := written(b), time.Now()
				if err := s.Put(b.Context(), p); err != nil {
					b.Fatal(err)
				}
				puts = append(puts, time.Since(start))
				size := written(b) - before
				bytes += size
				if err := s.Delete(b.Context(), p.Pod.UID); err != nil {
					b.Fatal(err)
				}
				syncs = append(syncs, rawSync(b, raw, size))
			}
			slices.Sort(puts)
			slices.Sort(syncs)
			b.ReportMetric(float64(puts[len(puts)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(puts[len(puts)*99/100].Microseconds()), "p99-µs")
			b.ReportMetric(float64(syncs[len(syncs)/2].Microseconds()), "fdatasync-p50-µs")
			b.ReportMetric(float64(bytes)/float64(len(puts)), "B-written/op")
		})
	}
}

// rawSync overwrites the beginning of a file.
func rawSync(b *testing.B, f *os.File, size int) time.Duration {
	data := make([]byte, size)
	start := time.Now()
	if _, err := f.WriteAt(data, 0); err != nil {
		b.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

// written returns how many bytes this process has given to write(2) and pwrite(2).
func written(b *testing.B) int {
	data, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "wchar: ")
	line, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.Atoi(line)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

func fillTest(b *testing.B, path string, n int) *Store {
	b.Helper()
	s, _ := openTest(b, path)
	s.db.NoSync = true
	for i := range n {
		if err := s.Put(b.Context(), testPlacement(i)); err != nil {
			b.Fatal(err)
		}
	}
	s.db.NoSync = false
	return s
}

// BenchmarkOpen is a restart with N pods: reading and verifying the file, and writing it anew.
func BenchmarkOpen(b *testing.B) {
	for _, n := range []int{8, 1000, 10_000} {
		b.Run(fmt.Sprintf("placed=%d", n), func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "state.db")
			if err := fillTest(b, path, n).Close(); err != nil {
				b.Fatal(err)
			}
			var opens []time.Duration
			for b.Loop() {
				start := time.Now()
				s, loaded := openTest(b, path)
				opens = append(opens, time.Since(start))
				if len(loaded.Placements) != n {
					b.Fatalf("%d placements", len(loaded.Placements))
				}
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
			slices.Sort(opens)
			b.ReportMetric(float64(opens[len(opens)/2].Microseconds()), "p50-µs")
		})
	}
}
