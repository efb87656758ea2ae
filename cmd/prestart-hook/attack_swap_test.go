package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/test/lib/hoststate"
	"gpu-cdi-plugin/test/lib/testenv"
)

// exchange exchanges two paths without a pause, as another container with the same volume or the owner of the bundle
// can do, until the returned function is called.
func exchange(t *testing.T, pairs ...[2]string) (stop func()) {
	t.Helper()
	ended := make(chan struct{})
	var threads sync.WaitGroup
	for _, pair := range pairs {
		threads.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
					_ = unix.Renameat2(unix.AT_FDCWD, pair[0], unix.AT_FDCWD, pair[1], unix.RENAME_EXCHANGE)
				}
			}
		})
	}
	return func() {
		close(ended)
		threads.Wait()
	}
}

// While the hook works, a thread outside exchanges what is at a path with something hostile. Whatever the hook finds at
// which time, it stays in the root. CVE-2024-0132 and CVE-2026-24260 were such races.
func TestSlowAttackByExchange(t *testing.T) {
	link := func(target string) func(a *attack, name string) {
		return func(a *attack, name string) { a.link(strings.ReplaceAll(target, "OUTSIDE", a.outside), name) }
	}
	volume := func(target string) func(a *attack, name string) {
		return func(a *attack, name string) {
			a.volume("volume", "/volume")
			a.link(target, name)
		}
	}
	dir := func(a *attack, name string) { testenv.Must(a.t, os.MkdirAll(a.path(name), 0o755)) }
	file := func(a *attack, name string) { testenv.Must(a.t, os.WriteFile(a.path(name), []byte("x"), 0o644)) }
	for name, tc := range map[string]struct {
		run   position
		users bool
		path  string
		own   func(a *attack, name string) // what is there at first
		other func(a *attack, name string)
	}{
		"the directory of a node, and a link out": {inCreateRuntime, false, "/dev/dri", dir, link("OUTSIDE/victim")},
		"the directory of a node, and a volume":   {inCreateRuntime, false, "/dev/dri", dir, volume("/volume")},
		"a node, and a link to a file":            {inCreateRuntime, false, "/dev/nvidia0", file, link("OUTSIDE/file")},
		"all nodes, and a link to the host's":     {inCreateRuntime, false, "/dev", dir, link("/proc/1/root/dev")},
		"a mounted node, and a link out":          {inCreateRuntime, true, "/dev/nvidia0", file, link("OUTSIDE/file")},
		"a mounted node, and a link to a setting": {
			inCreateRuntime, true, "/dev/nvidia0", file, link("/proc/sys/kernel/core_pattern"),
		},
		"the directory of one, and a volume":      {inCreateRuntime, true, "/dev/dri", dir, volume("/volume")},
		"the directory of mounts, and a link out": {inCreateRuntime, false, "/opt/driver", dir, link("OUTSIDE/victim")},
		"the directory of mounts, and a volume":   {inCreateRuntime, false, "/opt/driver", dir, volume("/volume")},
		"a mount point, and a link to the root":   {inCreateRuntime, false, "/opt/driver/dir", dir, link("/")},
		"a mount point, and a link to settings":   {inCreateRuntime, false, "/opt/driver/dir", dir, link("/proc/sys")},
		"the directory of a link, and a link out": {
			inCreateRuntime, false, "/usr/lib/x", dir, link("../../../../outside/victim"),
		},
		"the directory of the cache, and a volume": {inCreateRuntime, false, "/etc", dir, volume("/volume")},
		"the cache, and a link to a secret": {
			inCreateRuntime, false, "/etc/ld.so.cache", file, link("OUTSIDE/secret"),
		},
		"musl's path, and a Secret": {
			inCreateRuntime, false, "/etc/ld-musl-x86_64.path", file, volume("/volume/secret"),
		},
		"createContainer: the cache, and a link":   {inCreateContainer, false, "/etc", dir, link("OUTSIDE/victim/etc")},
		"createContainer: the cache, and a volume": {inCreateContainer, false, "/etc", dir, volume("/volume")},
		"createContainer: musl's path and a Secret": {
			inCreateContainer, false, "/etc/ld-musl-x86_64.path", file, volume("/volume/secret"),
		},
		"createContainer: a link's directory": {inCreateContainer, false, "/usr/lib/x", dir, link("OUTSIDE/victim")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAttack(t)
			a.users = tc.users
			if strings.HasPrefix(name, "createContainer") {
				testenv.Must(t, os.MkdirAll(a.path("/opt/driver/dir"), 0o755))
				testenv.Must(t, os.WriteFile(a.path("/opt/driver/libcuda.so.580.1"), []byte("driver"), 0o755))
			}
			testenv.Must(t, os.MkdirAll(filepath.Dir(a.path(tc.path)), 0o755))
			testenv.Must(t, os.RemoveAll(a.path(tc.path)))
			tc.own(a, tc.path)
			tc.other(a, "/other")
			a.own()
			before := a.host()
			stop := exchange(t, [2]string{a.path(tc.path), a.path("/other")})
			results := map[int]int{}
			for begin := time.Now(); time.Since(begin) < *attackTime; {
				a.start()
				status, _ := tc.run(a)
				results[status]++
				a.checkNoSecret()
				a.checkProc()
				end(a.process)
			}
			stop()
			before.Check(t)
			t.Log("starts by their status: ", results)
		})
	}
}

// The owner of the bundle exchanges the root by another container's, or config.json by one that names it.
func TestSlowAttackByExchangeOfTheBundle(t *testing.T) {
	for name, prepare := range map[string]func(a *attack) [2]string{
		"the root, and a link to another's": func(a *attack) [2]string {
			testenv.Must(a.t, os.Symlink(a.outside+"/victim", a.bundle+"/other"))
			return [2]string{a.root, a.bundle + "/other"}
		},
		"the root, and another directory": func(a *attack) [2]string {
			testenv.Must(a.t, os.MkdirAll(a.outside+"/directory/dev", 0o755))
			return [2]string{a.root, a.outside + "/directory"}
		},
		"config.json, and that of another": func(a *attack) [2]string {
			a.writeJSON(a.bundle+"/other", a.config(a.outside+"/victim"))
			return [2]string{a.bundle + "/config.json", a.bundle + "/other"}
		},
		"config.json, and a link to a secret": func(a *attack) [2]string {
			testenv.Must(a.t, os.Symlink(a.outside+"/secret", a.bundle+"/other"))
			return [2]string{a.bundle + "/config.json", a.bundle + "/other"}
		},
		"the bundle, and a link to another": func(a *attack) [2]string {
			a.writeJSON(a.outside+"/victim/config.json", a.config(a.outside+"/victim"))
			testenv.Must(a.t, os.Symlink(a.outside+"/victim", a.bundle+".other"))
			testenv.Must(a.t, os.Lchown(a.bundle+".other", 1000, 1000))
			return [2]string{a.bundle, a.bundle + ".other"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAttack(t)
			a.start()
			pair := prepare(a)
			testenv.Must(t, os.Lchown(filepath.Dir(a.bundle), 1000, 1000))
			testenv.Must(t, os.Lchown(a.bundle, 1000, 1000))
			before := hoststate.Take(t, a.outside+"/victim", a.outside+"/volume", a.outside+"/driver", "/run")
			stop := exchange(t, pair)
			for begin := time.Now(); time.Since(begin) < *attackTime; {
				if _, stderr := inCreateRuntime(a); strings.Contains(stderr, "precious") {
					t.Errorf("the message has a secret: %s", stderr)
				}
			}
			stop()
			before.Check(t)
		})
	}
}

// gpu-cdi-runtime writes config.json in a directory that can be another user's.
func TestSlowAttackByExchangeBeforeTheRuntime(t *testing.T) {
	for name, prepare := range map[string]func(dir, secret string) [2]string{
		"config.json, and a link to a secret": func(dir, secret string) [2]string {
			return [2]string{dir + "/bundle/config.json", makeLink(t, secret, dir+"/bundle/other")}
		},
		"config.json, and a hard link to one": func(dir, secret string) [2]string {
			testenv.Must(t, os.Link(secret, dir+"/bundle/other"))
			return [2]string{dir + "/bundle/config.json", dir + "/bundle/other"}
		},
		"config.json, and a FIFO": func(dir, _ string) [2]string {
			testenv.Must(t, unix.Mkfifo(dir+"/bundle/other", 0o666))
			return [2]string{dir + "/bundle/config.json", dir + "/bundle/other"}
		},
		"the bundle, and a link to another": func(dir, secret string) [2]string {
			testenv.Must(t, os.Rename(secret, filepath.Dir(secret)+"/config.json"))
			return [2]string{dir + "/bundle", makeLink(t, filepath.Dir(secret), dir+"/other")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, env := newRuntime(t, "exit 0")
			outside := t.TempDir()
			config, err := os.ReadFile(dir + "/bundle/config.json")
			testenv.Must(t, err)
			testenv.Must(t, os.WriteFile(outside+"/secret", append([]byte(`{"precious": 1,`), config[1:]...), 0o600))
			pair := prepare(dir, outside+"/secret")
			for _, name := range []string{"", "/bundle", "/bundle/config.json", "/bundle/other", "/other"} {
				_ = os.Lchown(dir+name, 1000, 1000)
			}
			before := hoststate.Take(t, outside)
			a := &attack{t: t, bundle: dir, env: env}
			stop := exchange(t, pair)
			for begin := time.Now(); time.Since(begin) < *attackTime; {
				a.hook(strings.NewReader(""), runtimeName, "create", "--bundle", dir+"/bundle", "x")
			}
			stop()
			before.Check(t)
			for _, name := range []string{"config.json", "other"} {
				data, _ := fileio.ReadFile(filepath.Join(dir, "bundle", name), 1<<20)
				if strings.Contains(string(data), "precious") && strings.Contains(string(data), "/dev/nvidia0") {
					t.Errorf("the bundle has a secret: %s", data)
				}
			}
		})
	}
}

func makeLink(t *testing.T, target, name string) string {
	t.Helper()
	testenv.Must(t, os.Symlink(target, name))
	return name
}
