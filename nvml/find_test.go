package nvml

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/ldcache"
	"gpu-cdi-plugin/test/lib/testenv"
)

var thisMachine = elffile.MachineOf(runtime.GOARCH)

func noLoader(string) string { return "" }

func hostAt(t *testing.T, root string, dirs ...string) host.Host {
	h, err := host.New("", root, "")
	testenv.Must(t, err)
	return h.WithDirs(dirs)
}

func TestFindInADriverRoot(t *testing.T) {
	good, other := string(createLibrary(thisMachine)), string(createLibrary(elf.EM_386))
	multiarch := "lib/" + host.MachineName() + "-linux-gnu"
	for name, c := range map[string]struct {
		files map[string]string
		links map[string]string
		want  string
	}{
		"Red Hat and its kin": {
			map[string]string{"usr/lib64/libnvidia-ml.so.1": good}, nil, "usr/lib64/libnvidia-ml.so.1",
		},
		"Debian": {
			map[string]string{"usr/" + multiarch + "/libnvidia-ml.so.1": good},
			nil,
			"usr/" + multiarch + "/libnvidia-ml.so.1",
		},
		"Debian's own packages": {
			map[string]string{"usr/" + multiarch + "/nvidia/current/libnvidia-ml.so.580.1": good},
			map[string]string{"usr/" + multiarch + "/nvidia/current/libnvidia-ml.so.1": "libnvidia-ml.so.580.1"},
			"usr/" + multiarch + "/nvidia/current/libnvidia-ml.so.580.1",
		},
		"a container host": {
			map[string]string{"usr/local/nvidia/lib64/libnvidia-ml.so.1": good},
			nil,
			"usr/local/nvidia/lib64/libnvidia-ml.so.1",
		},
		"an absolute link stays in the root": {
			map[string]string{"opt/driver/libnvidia-ml.so.580.1": good},
			map[string]string{"usr/lib64/libnvidia-ml.so.1": "/opt/driver/libnvidia-ml.so.580.1"},
			"opt/driver/libnvidia-ml.so.580.1",
		},
		"a link that climbs stays in the root": {
			map[string]string{"opt/libnvidia-ml.so.580.1": good},
			map[string]string{"usr/lib64/libnvidia-ml.so.1": "../../../../../opt/libnvidia-ml.so.580.1"},
			"opt/libnvidia-ml.so.580.1",
		},
		"a 32-bit library is passed over": {
			map[string]string{"usr/lib64/libnvidia-ml.so.1": other, multiarch + "/libnvidia-ml.so.1": good},
			nil, multiarch + "/libnvidia-ml.so.1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := createHost(t, c.files).Root()
			for link, target := range c.links {
				testenv.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(root, link)), 0o755))
				symlink(t, filepath.Join(root, link), target)
			}
			got, err := find(hostAt(t, root), "", noLoader)
			if want := filepath.Join(root, c.want); err != nil || got != want {
				t.Errorf("got %q and error %v, want %q", got, err, want)
			}
		})
	}
}

// The loader's cache of the driver's root names directories that are not the usual ones, and an administrator names
// others.
func TestFindInUnusualDirectories(t *testing.T) {
	good := string(createLibrary(thisMachine))
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	cache := func(path string) string {
		c := &ldcache.Cache{Entries: []ldcache.Entry{{Name: libraryName, Path: path, Flags: flags}}}
		return string(c.Marshal())
	}
	for name, c := range map[string]struct {
		cached string
		dirs   []string
		want   string
	}{
		"the cache of the root":               {"/store/lib/" + libraryName, nil, "store/lib"},
		"a link in the cache's path":          {"/profile/lib/" + libraryName, nil, "store/lib"},
		"the cache has a file that is gone":   {"/gone/" + libraryName, nil, "usr/lib64"},
		"no cache":                            {"", nil, "usr/lib64"},
		"a named directory goes before both":  {"/store/lib/" + libraryName, []string{"/opt/nvidia"}, "opt/nvidia/lib64"},
		"a named directory of libraries":      {"", []string{"/none", "/opt/nvidia/lib64"}, "opt/nvidia/lib64"},
		"a named directory without libraries": {"", []string{"/opt"}, "usr/lib64"},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{
				"store/lib/" + libraryName: good, "usr/lib64/" + libraryName: good, "opt/nvidia/lib64/" + libraryName: good,
			}
			if c.cached != "" {
				files["etc/ld.so.cache"] = cache(c.cached)
			}
			root := createHost(t, files).Root()
			symlink(t, filepath.Join(root, "profile"), "/store")
			got, err := find(hostAt(t, root, c.dirs...), "", noLoader)
			if want := filepath.Join(root, c.want, libraryName); err != nil || got != want {
				t.Errorf("got %q and error %v, want %q", got, err, want)
			}
		})
	}
}

func TestFindFails(t *testing.T) {
	good := string(createLibrary(thisMachine))
	files := map[string]string{"bad/usr/lib64/libnvidia-ml.so.1": good[:1000], "cut.so": good[:4000]}
	root := createHost(t, files).Root()
	testenv.Must(t, os.Symlink("usr/lib64", root+"/bad/lib64"))
	if _, err := find(hostAt(t, root+"/bad"), "", noLoader); strings.Contains(err.Error(), "\n") {
		t.Errorf("one file has two errors: %v", err)
	}
	for name, c := range map[string]struct {
		root, explicit string
		want           error
		text           string
	}{
		"a root without a driver":        {root, "", ErrLibraryNotFound, root},
		"a root with a damaged driver":   {root + "/bad", "", ErrLibraryUnusable, "ml.so.1: the file is truncated"},
		"a library that is not there":    {root, root + "/none.so", ErrLibraryNotFound, root + "/none.so"},
		"a library that is a directory":  {root, root + "/bad", ErrLibraryUnusable, "is a directory"},
		"a library that is truncated":    {root, root + "/cut.so", ErrLibraryUnusable, "cut.so: the file is truncated"},
		"a root that is not there":       {root + "/none", "", ErrLibraryNotFound, root + "/none"},
		"an explicit one is not guessed": {root, "/none/lib.so", ErrLibraryNotFound, "/none/lib.so"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := find(hostAt(t, c.root), c.explicit, noLoader)
			if got != "" {
				t.Errorf("got %q and error %v", got, err)
			}
			checkError(t, err, c.want, c.text)
		})
	}
}

func TestFindWithTheLoader(t *testing.T) {
	good := string(createLibrary(thisMachine))
	inRoot := createHost(t, map[string]string{"usr/lib64/libnvidia-ml.so.1": good}).Root()
	loader := func(name string) string { return "/of/the/loader/" + name }
	for name, c := range map[string]struct{ root, explicit, want string }{
		"the host's own root": {"/", "", "/of/the/loader/" + libraryName},
		"another root":        {inRoot, "", inRoot + "/usr/lib64/libnvidia-ml.so.1"},
		"a file goes before both": {
			"/", inRoot + "/usr/lib64/libnvidia-ml.so.1", inRoot + "/usr/lib64/libnvidia-ml.so.1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := find(hostAt(t, c.root), c.explicit, loader)
			if err != nil || got != c.want {
				t.Errorf("got %q and error %v, want %q", got, err, c.want)
			}
		})
	}
}

// The library is found as the dynamic loader finds it, without loading it.
func TestLoaderPath(t *testing.T) {
	dir := createHost(t, map[string]string{
		"a/lib.so": string(createLibrary(thisMachine)), "b/lib.so": string(createLibrary(thisMachine)),
		"bad/lib.so": string(createLibrary(elf.EM_386)), "empty/x": "",
	}).Root()
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	entry := func(path string, flags int32) ldcache.Entry {
		return ldcache.Entry{Name: "lib.so", Path: dir + path, Flags: flags}
	}
	cacheWith := func(entries ...ldcache.Entry) string {
		file := filepath.Join(t.TempDir(), "ld.so.cache")
		cache := &ldcache.Cache{Entries: entries}
		testenv.Must(t, os.WriteFile(file, cache.Marshal(), 0o600))
		return file
	}
	inCache := cacheWith(entry("/b/lib.so", flags))
	for name, c := range map[string]struct{ searchPath, cache, want string }{
		"in the cache":                         {"", inCache, "/b/lib.so"},
		"in LD_LIBRARY_PATH":                   {dir + "/a", inCache, "/a/lib.so"},
		"in its second directory":              {dir + "/empty:" + dir + "/a", inCache, "/a/lib.so"},
		"after a semicolon":                    {dir + "/empty;" + dir + "/a", inCache, "/a/lib.so"},
		"another machine's there":              {dir + "/bad", inCache, "/b/lib.so"},
		"nowhere there":                        {dir + "/empty", inCache, "/b/lib.so"},
		"no cache":                             {"", dir + "/none", ""},
		"no cache, but one in LD_LIBRARY_PATH": {dir + "/a", dir + "/none", "/a/lib.so"},
		"a damaged cache":                      {"", dir + "/a/lib.so", ""},
		"not in the cache":                     {"", cacheWith(), ""},
		"in the cache, of another machine":     {"", cacheWith(entry("/bad/lib.so", flags)), ""},
		"in the cache, for other programs":     {"", cacheWith(entry("/b/lib.so", 1)), ""},
		"in the cache, and gone":               {"", cacheWith(entry("/none", flags)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := loaderPathIn(c.searchPath, c.cache, "lib.so")
			if c.want != "" {
				c.want = dir + c.want
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// createLibrary returns the smallest file that passes for a shared library: headers and one segment of a page.
func createLibrary(machine elf.Machine) []byte {
	header := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
	}
	copy(header.Ident[:], elf.ELFMAG)
	header.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	header.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	header.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	segment := elf.Prog64{Type: uint32(elf.PT_LOAD), Filesz: 4096, Memsz: 4096}
	var file bytes.Buffer
	for _, part := range []any{header, segment} {
		if err := binary.Write(&file, binary.LittleEndian, part); err != nil {
			panic(err)
		}
	}
	return append(file.Bytes(), make([]byte, 4096-file.Len())...)
}

func TestCheckLibrary(t *testing.T) {
	for name, c := range map[string]struct {
		file []byte
		want string // part of the error; empty if there is none
	}{
		"a library":           {createLibrary(thisMachine), ""},
		"a linker script":     {[]byte("/* GNU ld script */\nGROUP ( libm.so.6 )\n"), "not an ELF file"},
		"another machine":     {createLibrary(elf.EM_ARM), "it is for EM_ARM, this machine is " + thisMachine.String()},
		"a program":           {setByte(createLibrary(thisMachine), 16, byte(elf.ET_EXEC)), "but ET_EXEC"},
		"a truncated library": {createLibrary(thisMachine)[:4095], "the file is truncated"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
			testenv.Must(t, os.WriteFile(path, c.file, 0o600))
			err := checkLibrary(path)
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			checkError(t, err, ErrLibraryUnusable, path+": ")
			checkError(t, err, ErrLibraryUnusable, c.want)
		})
	}
}

func setByte(file []byte, at int, value byte) []byte {
	file[at] = value
	return file
}

func TestCheckLibraryOfWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		path string
		want error
	}{
		"absent":              {filepath.Join(dir, "absent"), ErrLibraryNotFound},
		"a directory":         {dir, ErrLibraryUnusable},
		"a device":            {os.DevNull, ErrLibraryUnusable},
		"below a file":        {os.DevNull + "/x", ErrLibraryUnusable},
		"a link to nowhere":   {symlink(t, filepath.Join(dir, "link"), "nowhere"), ErrLibraryNotFound},
		"a link that circles": {symlink(t, filepath.Join(dir, "loop"), "loop"), ErrLibraryUnusable},
	} {
		t.Run(name, func(t *testing.T) {
			if err := checkLibrary(c.path); !errors.Is(err, c.want) {
				t.Errorf("got the error %v, want %v", err, c.want)
			}
		})
	}
}
