package cdi

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// specWith is a spec with devices of those names.
func specWith(kind string, names ...string) *specs.Spec {
	s := &specs.Spec{Version: "0.5.0", Kind: kind}
	for _, n := range names {
		edits := specs.ContainerEdits{Env: []string{"D=" + n}}
		s.Devices = append(s.Devices, specs.Device{Name: n, ContainerEdits: edits})
	}
	return s
}

func writeSpec(t testing.TB, path string, spec *specs.Spec) {
	t.Helper()
	testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	testenv.Must(t, WriteFile(path, spec))
}

func TestLoad(t *testing.T) {
	r := newTree(t)
	low, high := r.dir+"/etc", r.dir+"/run"
	writeSpec(t, low+"/a.json", specWith("nvidia.com/gpu", "0", "1", "only-low"))
	writeSpec(t, high+"/b.yaml", specWith("nvidia.com/gpu", "0", "10", "2", "twice"))
	writeSpec(t, high+"/c.json", specWith("nvidia.com/gpu", "twice"))
	writeSpec(t, high+"/d.json", specWith("other.org/nic", "0"))
	r.file("/run/broken.json", "{", 0o644)
	r.file("/run/.hidden.tmp", "{", 0o644)
	r.file("/run/ignored.yml", "{", 0o644)
	testenv.Must(r.t, os.Mkdir(high+"/dir.json", 0o755))
	c := Load(low, high+"/", r.dir+"/nowhere", high)

	if diff := cmp.Diff([]string{low, high, r.dir + "/nowhere"}, c.Dirs); diff != "" {
		t.Errorf("directories (-want +got):\n%s", diff)
	}
	want := []string{
		"gpu=0 run/b.yaml available ", "gpu=0 etc/a.json shadowed run/b.yaml", "gpu=1 etc/a.json available ",
		"gpu=2 run/b.yaml available ", "gpu=10 run/b.yaml available ", "gpu=only-low etc/a.json available ",
		"gpu=twice run/b.yaml conflict run/c.json", "gpu=twice run/c.json conflict run/b.yaml",
		"nic=0 run/d.json available ",
	}
	var got []string
	for _, o := range c.Devices {
		row := fmt.Sprintf("%s %s %s %s", o.Name[strings.Index(o.Name, "/")+1:], o.File, o.State, o.Other)
		got = append(got, strings.ReplaceAll(row, r.dir+"/", ""))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	var broken []string
	for _, f := range c.Files {
		if f.Error != "" {
			broken = append(broken, filepath.Base(f.Path))
		} else if f.Spec == nil || f.Devices != len(f.Spec.Devices) || f.Kind == "" || f.Version != "0.5.0" {
			t.Errorf("file %+v", f)
		}
	}
	if diff := cmp.Diff([]string{"broken.json"}, broken); diff != "" {
		t.Errorf("files with errors (-want +got):\n%s", diff)
	}
}

func TestLoadReportsAFileInPlaceOfADirectory(t *testing.T) {
	r := newTree(t)
	r.file("/etc", "", 0o644)
	c := Load(r.dir + "/etc")
	if len(c.Files) != 1 || !strings.Contains(c.Files[0].Error, "not a directory") {
		t.Errorf("files %+v", c.Files)
	}
}

// The CDI library stops at a directory that it cannot read, and offers the devices of those before it.
func TestLoadStopsWhereTheLibraryStops(t *testing.T) {
	r := newTree(t)
	dirs := []string{r.dir + "/low", r.dir + "/etc", r.dir + "/run"}
	writeSpec(t, dirs[0]+"/a.json", specWith("x.y/z", "low"))
	r.file("/etc", "", 0o644)
	writeSpec(t, dirs[2]+"/b.json", specWith("x.y/z", "high"))
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dirs...), cdilib.WithAutoRefresh(false))
	testenv.Must(r.t, err)
	c := Load(dirs...)
	if diff := cmp.Diff(cache.ListDevices(), c.Names()); diff != "" || len(c.Names()) != 1 {
		t.Errorf("available (-library +ours):\n%s", diff)
	}
	testenv.Must(r.t, c.Unread(dirs[0]+"/ours.json"))
	checkError(t, c.Unread(dirs[2]+"/ours.json"), dirs[2]+"/ours.json", dirs[1]+": not a directory")
}

// The available devices are those that the CDI library, and so every engine, offers, with any shadows and conflicts.
func TestLoadAgreesWithTheLibrary(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 60 {
		root := t.TempDir()
		var dirs []string
		for d := range 3 {
			dirs = append(dirs, fmt.Sprintf("%s/%d", root, d))
			for f := range random.IntN(4) {
				names := []string{"a", "b", "c", "d", "e"}
				random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
				writeSpec(t, fmt.Sprintf("%s/%d.json", dirs[d], f), specWith("x.y/z", names[:1+random.IntN(2)]...))
			}
		}
		cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dirs...), cdilib.WithAutoRefresh(false))
		testenv.Must(t, err)
		got := Load(dirs...).Names()
		slices.Sort(got)
		if diff := cmp.Diff(cache.ListDevices(), got); diff != "" && len(got)+len(cache.ListDevices()) > 0 {
			t.Fatalf("available (-library +ours):\n%s%+v", diff, Load(dirs...).Devices)
		}
	}
}

func TestCheckConflicts(t *testing.T) {
	r := newTree(t)
	low, high, link := r.dir+"/etc", r.dir+"/run", r.dir+"/var-run"
	testenv.Must(r.t, os.Symlink("run", link))
	ours := specWith(DefaultKind, "0", "GPU-a", "all")
	type testCase struct {
		other string
		spec  *specs.Spec
		path  string
		want  string // empty for none
	}
	for name, c := range map[string]testCase{
		"another file of the directory": {
			high + "/nvidia.yaml", specWith(DefaultKind, "x", "GPU-a"), high + "/ours.json", "neither",
		},
		"a file of a higher priority": {
			high + "/nvidia.yaml", specWith(DefaultKind, "all"), low + "/ours.json", "would use",
		},
		"a file of a lower priority": {
			low + "/nvidia.yaml", specWith(DefaultKind, "all"), high + "/ours.json", "would ignore",
		},
		"the file itself": {
			high + "/ours.json", specWith(DefaultKind, "all"), high + "/../run/ours.json", "",
		},
		"the same name in YAML": {
			high + "/ours.yaml", specWith(DefaultKind, "all"), high + "/ours.json", "neither",
		},
		"other names": {
			high + "/nvidia.yaml", specWith(DefaultKind, "7"), high + "/ours.json", "",
		},
		"another kind": {
			high + "/nvidia.yaml", specWith("nvidia.com/other", "0"), high + "/ours.json", "",
		},
		"the directory by another name": {
			high + "/nvidia.yaml", specWith(DefaultKind, "0"), link + "/ours.json", "neither",
		},
		"the file itself by another name": {
			high + "/ours.json", specWith(DefaultKind, "0"), link + "/ours.json", "",
		},
		"a directory that engines do not read": {
			high + "/nvidia.yaml", specWith(DefaultKind, "0"), r.dir + "/somewhere/ours.json", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Must(r.t, os.RemoveAll(low))
			testenv.Must(r.t, os.RemoveAll(high))
			writeSpec(t, c.other, c.spec)
			err := Load(low, high).CheckConflicts(c.path, ours)
			if c.want == "" {
				if err != nil {
					t.Errorf("unexpected: %v", err)
				}
				return
			}
			checkError(t, err, c.other, DefaultKind+"=", c.want)
			if conflict, ok := errors.AsType[*ConflictError](err); !ok || conflict.Conflict.File != c.other {
				t.Errorf("error %v does not carry the conflict with %s", err, c.other)
			}
		})
	}
}

func TestConflicts(t *testing.T) {
	r := newTree(t)
	low, mid, high := r.dir+"/etc", r.dir+"/run", r.dir+"/more"
	path := mid + "/ours.json"
	for name, c := range map[string]struct {
		others []string // files that define x.y/z=a
		want   Conflict
	}{
		"a lower priority":  {[]string{low + "/1.json"}, Conflict{File: low + "/1.json", State: Available}},
		"a higher priority": {[]string{high + "/1.json"}, Conflict{File: high + "/1.json", State: Shadowed}},
		"the same directory": {
			[]string{mid + "/1.json"}, Conflict{File: mid + "/1.json", State: Conflicting, leftToOther: true},
		},
		"two of a lower priority": {
			[]string{low + "/1.json", low + "/2.json"}, Conflict{File: low + "/2.json", State: Conflicting},
		},
		"two of a higher priority": {
			[]string{high + "/1.json", high + "/2.json"}, Conflict{File: high + "/1.json", State: Conflicting},
		},
		"the same directory and a higher priority": {
			[]string{mid + "/1.json", high + "/2.json"},
			Conflict{File: mid + "/1.json", State: Conflicting, leftToOther: true},
		},
		"a link to the spec":             {[]string{"link"}, Conflict{File: mid + "/link.json", State: Conflicting}},
		"a link from a higher directory": {[]string{"high link"}, Conflict{File: high + "/link.json", State: Shadowed}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, dir := range []string{low, mid, high} {
				testenv.Must(r.t, os.RemoveAll(dir))
				testenv.Must(r.t, os.Mkdir(dir, 0o755))
			}
			ours := specWith("x.y/z", "a", "b")
			writeSpec(t, path, ours)
			for _, other := range c.others {
				switch other {
				case "link":
					testenv.Must(r.t, os.Symlink("ours.json", mid+"/link.json"))
				case "high link":
					testenv.Must(r.t, os.Symlink(path, high+"/link.json"))
				default:
					writeSpec(t, other, specWith("x.y/z", "a", "x"))
				}
			}
			c.want.Name = "x.y/z=a"
			dirs := Load(low, mid, high)
			got := dirs.Conflicts(path, ours)
			if len(got) == 0 || got[0] != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			offered := dirs.OfferedFrom(path)
			if offered["x.y/z=a"] != (c.want.State == Available) || offered["x.y/z=x"] ||
				strings.Contains(name, "link") == offered["x.y/z=b"] {
				t.Errorf("engines take %v from the spec", offered)
			}
			for _, none := range [][]Conflict{
				dirs.Conflicts("", ours), dirs.Conflicts(r.dir+"/elsewhere/x.json", ours), dirs.Conflicts(path, nil),
			} {
				if len(none) > 0 {
					t.Errorf("a spec without a path or devices, or outside the directories, has conflicts: %+v", none)
				}
			}
		})
	}
}

// A directory with two names is read once, or its files would shadow themselves.
func TestLoadReadsADirectoryWithTwoNamesOnce(t *testing.T) {
	r := newTree(t)
	writeSpec(t, r.dir+"/run/a.json", specWith("x.y/z", "0"))
	testenv.Must(r.t, os.Symlink("run", r.dir+"/var-run"))
	c := Load(r.dir+"/run", r.dir+"/var-run", r.dir+"/run/../run/")
	if len(c.Dirs) != 1 || len(c.Files) != 1 || len(c.Devices) != 1 || c.Devices[0].State != Available {
		t.Errorf("got %+v", c)
	}
}

func TestCompareNames(t *testing.T) {
	want := []string{"", "0", "0:1", "0:2", "0:10", "1", "2", "10", "GPU-1", "GPU-2", "GPU-10", "a", "a01", "a1", "all"}
	got := slices.Clone(want)
	rand.New(rand.NewPCG(3, 4)).Shuffle(len(got), func(i, j int) { got[i], got[j] = got[j], got[i] })
	slices.SortFunc(got, compareNames)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
