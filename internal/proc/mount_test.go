package proc

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestParseMounts(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []Mount // nil is an error
	}{
		"a private mount": {
			"36 35 98:1 /mnt1 /mnt2 rw,noatime - ext3 /dev/root rw,errors=continue\n",
			[]Mount{{ID: 36, Device: "98:1", Root: "/mnt1", Point: "/mnt2"}},
		},
		"a shared mount with more optional fields": {
			`29 1 0:1048575 / /a\040b rw unbindable shared:7 - tmpfs tmpfs rw`,
			[]Mount{{ID: 29, Device: "0:1048575", Root: "/", Point: `/a\040b`, Shared: true}},
		},
		"a slave without a source": {
			"40 29 0:5 / /x rw master:7 propagate_from:2 - tmpfs  rw",
			[]Mount{{ID: 40, Device: "0:5", Root: "/", Point: "/x", Slave: true}},
		},
		"a source that looks like propagation": {
			"40 29 0:5 / /x rw - tmpfs shared:1 rw", []Mount{{ID: 40, Device: "0:5", Root: "/", Point: "/x"}},
		},
		"too few fields": {"36 35 98:1 /mnt1 /mnt2 - ext3 /dev/root rw", nil},
		"no dash":        {"36 35 98:1 /mnt1 /mnt2 rw ext3 /dev/root rw", nil},
		"no mount ID":    {"x 35 98:1 /mnt1 /mnt2 rw - ext3 /dev/root rw", nil},
		"an empty line":  {"\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseMounts(c.text)
			if diff := gocmp.Diff(c.want, got); diff != "" || (err == nil) != (c.want != nil) {
				t.Errorf("error %v, (-want +got)\n%s", err, diff)
			}
		})
	}
}

// The place of a file is what mountinfo says of a mount of it, wherever that mount is, also after the file's end.
func TestPlaceOf(t *testing.T) {
	testenv.Root(t)
	runtime.LockOSThread() // it stays locked, so that the thread and its mounts end with this test
	testenv.Must(t, unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	dir := filepath.Join(t.TempDir(), `a b\c`)
	testenv.Must(t, os.Mkdir(dir, 0o700))
	for name, mount := range map[string]func(target string) error{
		"in a directory":               func(string) error { return nil },
		"at the root of a file system": func(target string) error { return unix.Mount("tmpfs", target, "tmpfs", 0, "") },
		"in a mount of their directory": func(target string) error {
			return unix.Mount(target, target, "", unix.MS_BIND, "")
		},
	} {
		if testenv.Must(t, mount(dir)); name != "in a directory" {
			t.Cleanup(func() { testenv.Must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
		}
		file, target := filepath.Join(dir, "file"), filepath.Join(t.TempDir(), "target")
		testenv.Must(t, os.WriteFile(file, nil, 0o600), os.WriteFile(target, nil, 0o600))
		f, err := os.Open(file)
		testenv.Must(t, err)
		self, err := Self(procfs)
		testenv.Must(t, err)
		got, err := self.PlaceOf(f)
		testenv.Must(t, err, f.Close(), unix.Mount(file, target, "", unix.MS_BIND, ""))
		for _, end := range []string{"", DeletedMount} {
			found, err := self.HasMount(func(m Mount) bool {
				return m.Point == target && m.Device == got.Device && m.Root == got.Root+end
			})
			if !found || err != nil {
				t.Errorf("%s: no mount has %+v%s, %v", name, got, end, err)
			}
			if end == "" {
				testenv.Must(t, os.Remove(file))
			}
		}
		testenv.Must(t, unix.Unmount(target, 0))
		self.Close()
	}
}

// parseMounts returns all mounts of a mountinfo.
func parseMounts(text string) ([]Mount, error) {
	var mounts []Mount
	_, err := hasMount(strings.NewReader(text), func(m Mount) bool {
		mounts = append(mounts, m)
		return false
	})
	if err != nil {
		return nil, err
	}
	return mounts, nil
}

func FuzzParseMounts(f *testing.F) {
	f.Add("36 35 98:1 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("29 1 0:26 / /sys rw shared:7 - sysfs sysfs rw\n40 29 0:5 / /x rw - tmpfs  rw\n")
	f.Fuzz(func(t *testing.T, text string) {
		mounts, err := parseMounts(text)
		if (err == nil && text != "") == (mounts == nil) {
			t.Errorf("mounts %+v, error %v", mounts, err)
		}
	})
}
