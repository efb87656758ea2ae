package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
)

// BenchmarkProcess measures a run of the hook with 49 libraries and an image of 1,000. The floor is the same binary
// with
// --version. "first" merges and writes the cache, "again" changes nothing.
func BenchmarkProcess(b *testing.B) {
	hookBinary(b) // builds it
	b.Run("floor", func(b *testing.B) {
		c := newContainer(b)
		for b.Loop() {
			c.start(b, "--version")
		}
	})
	b.Run("first", func(b *testing.B) {
		c := newContainer(b)
		args, cache := writeLibraries(c)
		for b.Loop() {
			b.StopTimer()
			c.write("/etc/ld.so.cache", string(cache.Marshal()))
			for _, l := range args.Links {
				_ = os.Remove(c.path(l.Path))
			}
			b.StartTimer()
			c.start(b, args.Args()...)
		}
	})
	b.Run("again", func(b *testing.B) {
		c := newContainer(b)
		args, cache := writeLibraries(c)
		c.write("/etc/ld.so.cache", string(cache.Marshal()))
		for b.Loop() {
			c.start(b, args.Args()...)
		}
	})
}

func writeLibraries(c *container) (*hookargs.CreateContainer, *ldcache.Cache) {
	cache := &ldcache.Cache{}
	flags, _ := ldcache.FlagsFor("amd64")
	for i := range 1000 {
		name := fmt.Sprintf("libexample-with-a-name-%d.so.%d", i, i%9)
		path := "/usr/lib/x86_64-linux-gnu/" + name
		cache.Entries = append(cache.Entries, ldcache.Entry{Name: name, Path: path, Flags: flags})
	}
	args := &hookargs.CreateContainer{DriverVersion: "580.126.09", Params: true, EGLProfile: true}
	for i := range 49 {
		soname := fmt.Sprintf("libnvidia-part%d.so.1", i)
		lib := hookargs.Library{SONAME: soname, Path: fmt.Sprintf("/opt/driver/libnvidia-part%d.so.580.126.09", i)}
		c.write(lib.Path, "driver")
		args.Libraries = append(args.Libraries, lib)
		args.Links = append(args.Links, hookargs.Link{Path: "/opt/driver/" + soname, Target: lib.Path})
	}
	return args, cache
}

func (c *container) start(b *testing.B, args ...string) {
	b.Helper()
	cmd := exec.Command(hookBinary(b), args...)
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"id":"bench","bundle":%q}`, c.bundle))
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
}
