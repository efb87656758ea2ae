package driver

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDiscoverExtraRefuses(t *testing.T) {
	cases := map[string]struct {
		extra    Extra
		channels []int
		put      func(*tree)
		note     string // of some finding
	}{
		"a regular file in a node's place": {
			IMEX,
			[]int{3},
			func(r *tree) { r.file("/dev/nvidia-caps-imex-channels/channel3", "", 0o666) },
			"a regular file, not a character device",
		},
		"a channel with another number": {
			IMEX,
			[]int{4},
			func(r *tree) { r.link("/dev/nvidia-caps-imex-channels/channel3", "/dev/null") },
			"not found",
		},
		"a link to a node": {
			GDRCopy, nil,
			func(r *tree) { r.link("/dev/gdrdrv", "/dev/null") },
			"a symbolic link, not a character device",
		},
		"a directory in a file's place": {
			GDS, nil,
			func(r *tree) { r.file("/etc/cufile.json/x", "", 0o644) },
			"a directory, not used",
		},
		"a file in a directory's place": {
			GDS, nil,
			func(r *tree) { r.file("/run/udev", "", 0o644) },
			"a regular file, not used",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			c.put(r)
			found, findings := DiscoverExtra(r.host(), c.extra, c.channels)
			if len(found.Nodes)+len(found.Files) > 0 {
				t.Errorf("found %+v", found)
			}
			if !slices.ContainsFunc(findings, func(f Finding) bool { return f.Note == c.note }) {
				t.Errorf("no finding with the note %q: %+v", c.note, findings)
			}
		})
	}
}

// The settings of libcufile are those below the driver's root, if it has some. A link there cannot lead out of it.
func TestDiscoverExtraInADriverContainer(t *testing.T) {
	node, driver := newTree(t), newTree(t)
	node.file("/etc/cufile.json", "", 0o644)
	node.file("/run/udev/data/x", "", 0o644)
	driver.file("/opt/cufile.json", "", 0o644)
	driver.link("/etc/cufile.json", "/opt/cufile.json")
	h, err := host.New(node.dir, driver.dir, "")
	testenv.Must(t, err)
	found, _ := DiscoverExtra(h, GDS, nil)
	want := map[string]string{"/etc/cufile.json": driver.dir + "/opt/cufile.json", "/run/udev": node.dir + "/run/udev"}
	got := map[string]string{}
	for _, f := range found.Files {
		got[f.Path] = f.HostPath
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}
