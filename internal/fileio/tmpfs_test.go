package fileio

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestMakeDirsAt(t *testing.T) {
	for name, c := range map[string]struct {
		before func(top string) error
		path   string
		want   string // of the error, with TOP for the base; empty is none
	}{
		"directories that do not exist": {path: "a/b"},
		"some that do": {
			before: func(top string) error { return os.MkdirAll(top+"/a", 0o700) }, path: "/a//b/.",
		},
		"the base itself": {path: "."},
		"a link to a directory": {
			func(top string) error { return os.Symlink("/etc", top+"/a") }, "a/b",
			"TOP/a is no directory, and symbolic links are not followed here: remove it",
		},
		"a link that leads nowhere": {
			func(top string) error { return os.Symlink("none", top+"/a") }, "a",
			"TOP/a is no directory, and symbolic links are not followed here: remove it",
		},
		"a file": {
			func(top string) error { return os.WriteFile(top+"/a", nil, 0o600) }, "a/b",
			"TOP/a is no directory, and symbolic links are not followed here: remove it",
		},
		"a way out of the base": {path: "../x", want: "mkdir " + "OUTSIDE/x: invalid argument"},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			if c.before != nil {
				testenv.Must(t, c.before(top))
			}
			base, err := os.Open(top)
			testenv.Must(t, err)
			defer base.Close()
			dir, err := MakeDirsAt(base, c.path)
			if err == nil {
				defer dir.Close()
			}
			got := ""
			if err != nil {
				got = strings.NewReplacer(top, "TOP", filepath.Dir(top), "OUTSIDE").Replace(err.Error())
			}
			if got != c.want {
				t.Errorf("error %q, want %q", got, c.want)
			}
			if c.want == "" {
				own, err := dir.Stat()
				testenv.Must(t, err)
				there, err := os.Lstat(filepath.Join(top, c.path))
				testenv.Must(t, err)
				if !os.SameFile(own, there) || there.Mode().Perm() != 0o755 {
					t.Errorf("it is %v", there.Mode())
				}
			}
		})
	}
}

func TestMountTmpfs(t *testing.T) {
	testenv.Root(t)
	testenv.MountNamespace(t)
	path := filepath.Join(t.TempDir(), "shm")
	base, err := os.Open(filepath.Dir(path))
	testenv.Must(t, err)
	defer base.Close()
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	mount := func(options string) error {
		dir, err := MakeDirsAt(base, "shm")
		testenv.Must(t, err)
		defer dir.Close()
		return MountTmpfs(dir, "memory", options)
	}
	if err := mount("size=x"); err == nil || !strings.Contains(err.Error(), "with the options size=x") {
		t.Errorf("error %v", err)
	}
	testenv.Must(t, mount("size=1m,mode=1777"), mount("size=2m")) // the second does nothing
	mounts, err := os.ReadFile("/proc/thread-self/mounts")
	testenv.Must(t, err)
	want := "memory " + path + " tmpfs rw,nosuid,nodev,noexec,"
	if strings.Count(string(mounts), want) != 1 || !strings.Contains(string(mounts), "size=1024k") {
		t.Errorf("want one mount like %q, got\n%s", want, mounts)
	}
}
