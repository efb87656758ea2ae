package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/ldcache"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The image has links to files that the container's user cannot read but the hook can. The hook must copy nothing of
// them into a file that every user can read, written or mounted. The files parse: a search path of musl, a loader
// cache.
func TestEnginesLeakNoFileOfAnotherMount(t *testing.T) {
	const secretPath = "/secret-a:/secret-b\n"
	for name, tc := range map[string]struct {
		// path and cache are the targets of the image's links at musl's path file and at glibc's cache.
		path, cache string
		arrange     func(b *bundle, secrets string)
		// noCover marks files that crun cannot mount over in a read-only root, so that the container does not start:
		// files of /proc, and files in a masked directory.
		noCover bool
	}{
		"a volume": {path: "/volume/path", cache: "/volume/cache", arrange: func(b *bundle, secrets string) {
			b.mounts["/volume"] = secrets
		}},
		"a Secret": {path: "/run/secrets/path", cache: "/run/secrets/cache", arrange: func(b *bundle, secrets string) {
			// As the kubelet makes them: a tmpfs with a directory for each version, and links.
			tmpfs := filepath.Join(b.dir, "tmpfs")
			b.setup = "mkdir -p " + tmpfs + " && mount -t tmpfs -o mode=755 tmpfs " + tmpfs +
				" && mkdir " + tmpfs + "/..v1 && cp -p " + secrets + "/* " + tmpfs + "/..v1" +
				" && ln -s ..v1 " + tmpfs + "/..data && ln -s ..data/path ..data/cache " + tmpfs
			b.mounts["/run/secrets"] = tmpfs
		}},
		"a Secret of one file each": {path: "/path", cache: "/cache", arrange: func(b *bundle, secrets string) {
			tmpfs := filepath.Join(b.dir, "tmpfs")
			b.setup = "mkdir -p " + tmpfs + " && mount -t tmpfs tmpfs " + tmpfs + " && cp -p " + secrets + "/* " + tmpfs
			b.mounts["/path"], b.mounts["/cache"] = tmpfs+"/path", tmpfs+"/cache"
		}},
		"files mounted in place": {arrange: func(b *bundle, secrets string) {
			b.mounts["/etc/ld-musl-x86_64.path"], b.mounts["/etc/ld.so.cache"] = secrets+"/path", secrets+"/cache"
		}},
		"sysfs": {path: "/sys/kernel/notes", cache: "/sys/kernel/uevent_seqnum", arrange: mountSysfs},
		"sysfs, a masked path": {
			path: "/sys/firmware/memmap/0/start", cache: "/sys/firmware/memmap/0/end", arrange: mountSysfs,
			noCover: true,
		},
		"procfs": {
			path: "/proc/version", cache: "/proc/cmdline", arrange: func(*bundle, string) {}, noCover: true,
		},
		"procfs, a masked path": {path: "/proc/timer_list", cache: "/proc/keys", arrange: func(b *bundle, _ string) {
			b.masked = []string{"/proc/timer_list", "/proc/keys"}
		}},
	} {
		for _, e := range engines(t) {
			for mode, readonly := range map[string]bool{"": false, ", read-only": true} {
				t.Run(name+", "+e.name+mode, func(t *testing.T) {
					t.Parallel()
					b := newBundle(t)
					makeBothLibcImage(b)
					b.readonly = readonly
					secrets := makeSecrets(t, secretPath)
					tc.arrange(b, secrets)
					c := &container{t: t, root: b.root()}
					if tc.path != "" {
						c.link(tc.path, "/etc/ld-musl-x86_64.path")
						c.link(tc.cache, "/etc/ld.so.cache")
					}
					out, stderr, err := b.run(e)
					if err != nil && tc.noCover && readonly && e.name == "crun" {
						if !strings.Contains(stderr, "no program in the container would find libcuda.so.1") {
							t.Errorf("%v: %s", err, stderr)
						}
						return
					}
					want := "/lib\n/usr/local/lib\n/usr/lib\n/opt/driver\n" +
						"/opt/driver/libcuda.so.580.1\nlibcuda.so.1\nlibcuda.so\nprestart-hook of gpu-cdi-plugin"
					if out != want || err != nil {
						t.Errorf("the container reads %q, want %q; %v: %s", out, want, err, stderr)
					}
				})
			}
		}
	}
}

func mountSysfs(b *bundle, _ string) {
	b.more = []map[string]any{{"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": []string{"ro"}}}
	b.masked = []string{"/sys/firmware"}
}

// makeBothLibcImage makes an image with the paths of both C libraries' loaders. Its program runs as an unprivileged
// user, and prints musl's search path and the names in glibc's cache.
func makeBothLibcImage(b *bundle) {
	b.t.Helper()
	busybox := filepath.Join(b.root(), "bin/busybox")
	testimage.CopyFile(b.t, testenv.Command(b.t, "busybox"), busybox)
	c := &container{t: b.t, root: b.root()}
	_, loader := multiarch()
	c.write(loader, "loader")
	addMuslLoader(c)
	testenv.Must(c.t, os.MkdirAll(c.path("/etc"), 0o755))
	b.user = 1000
	b.process = []string{
		"/bin/busybox", "sh", "-c",
		`busybox cat /etc/ld-musl-x86_64.path; busybox strings /etc/ld.so.cache | busybox grep -v glibc-ld`,
	}
}

// makeSecrets makes a directory with files that only root can read: a search path and a loader cache.
func makeSecrets(t *testing.T, path string) string {
	t.Helper()
	dir := t.TempDir()
	flags, _ := ldcache.FlagsFor("amd64")
	cache := &ldcache.Cache{Generator: "secret", Entries: []ldcache.Entry{
		{Name: "libsecret.so.1", Path: "/secret/libsecret.so.1", Flags: flags},
		{Name: "libcuda.so.1", Path: "/opt/driver/libcuda.so.580.1", Flags: flags},
	}}
	for name, data := range map[string]string{"path": path, "cache": string(cache.Marshal())} {
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600))
	}
	return dir
}

// Lower layers of an overlay are the image's own files, though on another file system.
func TestEnginesReadLowerLayers(t *testing.T) {
	for _, e := range engines(t) {
		for mode, readonly := range map[string]bool{"": false, ", read-only": true} {
			t.Run(e.name+mode, func(t *testing.T) {
				t.Parallel()
				b := newBundle(t)
				makeBothLibcImage(b)
				b.readonly = readonly
				c := &container{t: t, root: b.root()}
				c.write("/etc/ld-musl-x86_64.path", "/image/lib:/lib\n")
				flags, _ := ldcache.FlagsFor("amd64")
				cache := &ldcache.Cache{Entries: []ldcache.Entry{
					{Name: "libimage.so.1", Path: "/image/lib/libimage.so.1", Flags: flags},
				}}
				c.write("/layer/cache", string(cache.Marshal()))
				c.link("../layer/cache", "/etc/ld.so.cache")
				// The lower layer is a tmpfs, the upper one is not.
				useOverlay(b)
				out, stderr, err := b.run(e)
				if err != nil || !strings.HasPrefix(out, "/image/lib\n/lib\n/opt/driver\n") ||
					!strings.Contains(out, "libimage.so.1") || !strings.Contains(out, "libcuda.so.1") {
					t.Errorf("the container reads %q, want what is in the layer too; %v: %s", out, err, stderr)
				}
			})
		}
	}
}

// useOverlay makes the root an overlay, whose lower layer is a tmpfs with the image.
func useOverlay(b *bundle) {
	b.t.Helper()
	b.setup = `cd ` + b.dir + `
		mkdir lower upper work
		mount -t tmpfs -o mode=755 tmpfs lower
		cp -a rootfs/. lower
		mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs
		cd /`
}

// A volume is mounted at /dev/dri, with a link to another volume.
func TestEnginesWriteToNoVolume(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			b := newBundle(t)
			makeBothLibcImage(b)
			volumes := t.TempDir()
			c := &container{t: t, root: volumes}
			makeDevice(c, "/dri/card1", 226, 1)
			c.link("/data", "/dri/by-path")
			c.write("/data/file", "")
			for to, from := range map[string]string{"/dev/dri": "/dri", "/data": "/data"} {
				b.more = append(b.more, map[string]any{
					"destination": to, "source": c.path(from), "type": "bind", "options": []string{"bind", "rw"},
				})
			}
			b.args = hookargs.CreateContainer{DRI: []hookargs.DRI{{PCIBusID: "0000:1b:00.0", Nodes: []string{"card1"}}}}
			b.process = []string{"/bin/busybox", "true"}
			before := testimage.Fingerprint(t, volumes)
			_, stderr, err := b.run(e)
			if err != nil || !strings.Contains(stderr, "on another mount") && e.name == "crun" {
				t.Errorf("%v: %s, want a message", err, stderr)
			}
			if testimage.Fingerprint(t, volumes) != before {
				t.Error("the hook wrote to a volume")
			}
		})
	}
}
