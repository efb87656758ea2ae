package dist

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// number and date are the version of the release in the tests, and its time in seconds.
const (
	number = "1.2.3"
	date   = 1700000000
)

// makeRelease makes a release of a tree for architectures, and returns its directory.
func makeRelease(tree, dir string, architectures ...string) (string, error) {
	r, err := proc.Run(context.Background(), proc.Cmd{
		Args: append([]string{"scripts/dist", number, dir}, architectures...), Dir: tree,
		Env: append(withoutMake(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", date)),
	})
	if err == nil && r.Code != 0 {
		err = errors.New(r.String())
	}
	return dir, err
}

// withoutMake returns the environment without what a make that runs the tests would pass on to another one.
func withoutMake() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") })
}

// first is a release for both architectures. All tests share it.
var first = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(tempDir, "release-")
	if err != nil {
		return "", err
	}
	root, err := suite.Root()
	if err != nil {
		return "", err
	}
	return makeRelease(root, dir, "amd64", "arm64")
})

func releaseDir(t *testing.T) string {
	t.Helper()
	dir, err := first()
	if err != nil {
		t.Fatalf("make a release: %v", err)
	}
	return dir
}

// untar returns the files of a tar archive with their content or the target of the link, by name.
func untar(t *testing.T, r io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		testenv.Must(t, err)
		if header.Uid != 0 || header.Gid != 0 {
			t.Errorf("%s belongs to %d:%d", header.Name, header.Uid, header.Gid)
		}
		switch header.Typeflag {
		case tar.TypeReg:
			files[header.Name], err = io.ReadAll(archive)
			testenv.Must(t, err)
		case tar.TypeSymlink:
			files[header.Name] = []byte(header.Linkname)
		}
	}
}

func gunzip(t *testing.T, data []byte) io.Reader {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(data))
	testenv.Must(t, err)
	return r
}

func readFile(t *testing.T, elem ...string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(elem...))
	testenv.Must(t, err)
	return data
}

func TestSlowARelease(t *testing.T) {
	dir := releaseDir(t)
	var names []string
	entries, err := os.ReadDir(dir)
	testenv.Must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := []string{
		"SHA256SUMS", "gpu-cdi-plugin_1.2.3_image.tar", "gpu-cdi-plugin_1.2.3_sbom.json",
		"gpu-cdi-plugin-1.2.3.tgz", "gpu-cdi-plugin_1.2.3.yaml",
	}
	for _, arch := range []struct{ deb, rpm string }{{"amd64", "x86_64"}, {"arm64", "aarch64"}} {
		want = append(want, "gpu-cdi-plugin_1.2.3_linux_"+arch.deb+".tar.gz")
		for _, name := range []string{"gpu-cdi-plugin", "device-manager"} {
			want = append(want, name+"_1.2.3_"+arch.deb+".deb", name+"-1.2.3-1."+arch.rpm+".rpm")
		}
	}
	slices.Sort(want)
	if slices.Sort(names); !slices.Equal(names, want) {
		t.Errorf("the release has %q, want %q", names, want)
	}
	for line := range strings.Lines(string(readFile(t, dir, "SHA256SUMS"))) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if got := fmt.Sprintf("%x", sha256.Sum256(readFile(t, dir, name))); got != sum {
			t.Errorf("%s has the checksum %s, and SHA256SUMS has %s", name, got, sum)
		}
	}
}

// TestADirectoryHasOneRelease: with the files of an earlier one the patterns of the guides would match two versions.
func TestADirectoryHasOneRelease(t *testing.T) {
	root, err := suite.Root()
	testenv.Must(t, err)
	dir := t.TempDir()
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "gpu-cdi-plugin-1.2.2.tgz"), nil, 0o644))
	r := proc.Must(t, 1, proc.Cmd{Args: []string{"scripts/dist", number, dir}, Dir: root})
	if want := dir + " is not empty"; !strings.Contains(r.Stderr, want) {
		t.Errorf("want %q, got %v", want, r)
	}
}

// TestSlowTheManifestIsTheChart renders the chart of the release, with its version.
func TestSlowTheManifestIsTheChart(t *testing.T) {
	chart := filepath.Join(releaseDir(t), "gpu-cdi-plugin-1.2.3.tgz")
	want := manifestHeader + helm(t, 0, "template", "gpu-cdi-plugin", chart, "--namespace", "kube-system").Stdout
	got := string(readFile(t, releaseDir(t), "gpu-cdi-plugin_1.2.3.yaml"))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-chart +manifest:\n%s", diff)
	}
	if !strings.Contains(want, "localhost/gpu-cdi-plugin:1.2.3\"") {
		t.Errorf("the image is not that of the release:\n%s", want)
	}
}

// TestSlowProgramsRunOnOldHosts reads from the programs which C library they need: one from 2012 for amd64, and for
// arm64 the first one.
func TestSlowProgramsRunOnOldHosts(t *testing.T) {
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		top := "gpu-cdi-plugin_1.2.3_linux_" + arch
		files := untar(t, gunzip(t, readFile(t, releaseDir(t), top+".tar.gz")))
		for _, name := range []string{"gpu-cdi-plugin", "device-manager", "prestart-hook"} {
			f, err := elf.NewFile(bytes.NewReader(files[path.Join(top, name)]))
			testenv.Must(t, err)
			libraries, err := f.ImportedLibraries()
			testenv.Must(t, err)
			dynamic := name == "gpu-cdi-plugin"
			if f.Machine != machine || f.Section(".symtab") != nil || (len(libraries) > 0) != dynamic {
				t.Errorf("%s for %s: %v, needs %q, symbols: %t", name, arch, f.Machine, libraries, f.Section(".symtab") != nil)
			}
			symbols, err := f.ImportedSymbols()
			if dynamic {
				testenv.Must(t, err)
			}
			for _, s := range symbols {
				if minor := glibcMinor(s.Version); minor > 17 {
					t.Errorf("%s for %s needs %s of %s", name, arch, s.Name, s.Version)
				}
			}
		}
	}
}

// glibcMinor returns the second number of a version of the C library, such as 17 for GLIBC_2.17, or 0.
func glibcMinor(version string) int {
	_, numbers, _ := strings.Cut(version, "GLIBC_2.")
	minor, _, _ := strings.Cut(numbers, ".")
	n, _ := strconv.Atoi(minor)
	return n
}

// TestTheSysrootSaysWhatToPin has a mirror that has other versions than the pinned ones, and no other mirror.
func TestTheSysrootSaysWhatToPin(t *testing.T) {
	bin := t.TempDir()
	testenv.WriteProgram(t, filepath.Join(bin, "apt-get"), []byte(`#!/bin/sh
for last; do :; done
case "$*" in
*indextargets*) echo http://mirror.example/debian/ ;;
*--print-uris*) echo "'http://mirror.example/p.deb' ${last}_1%3a2.31%2bdeb11u99_amd64.deb 7 SHA256:12ab" ;;
*download*) echo "E: Version for '$last' was not found" >&2 && exit 100 ;;
esac
`))
	root, err := suite.Root()
	testenv.Must(t, err)
	r := proc.Must(t, 1, proc.Cmd{
		Args: []string{filepath.Join(root, "scripts/sysroot"), "amd64", t.TempDir()},
		Env:  append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH")),
	})
	for _, want := range []string{
		"scripts/sysroot pins for amd64 cannot be downloaded from http://mirror.example/debian/ or http://snapshot.debian",
		"\nlibc6=1:2.31+deb11u99 12ab\n", "\nlinux-libc-dev=1:2.31+deb11u99 12ab\n", "was not found",
	} {
		if !strings.Contains(r.Stderr, want) {
			t.Errorf("want %q in the error, got %v", want, r)
		}
	}
}

// TestSlowAReleaseNamesItsModules compares the list of modules and the licences with what the programs say.
func TestSlowAReleaseNamesItsModules(t *testing.T) {
	dir := releaseDir(t)
	var bom struct {
		Components []struct{ Name, Version string }
	}
	testenv.Must(t, json.Unmarshal(readFile(t, dir, "gpu-cdi-plugin_1.2.3_sbom.json"), &bom))
	listed := map[string]string{}
	for _, c := range bom.Components {
		listed[c.Name] = c.Version
	}
	top := "gpu-cdi-plugin_1.2.3_linux_amd64"
	licences := string(untar(t, gunzip(t, readFile(t, dir, top+".tar.gz")))[top+"/LICENCES"])
	for _, name := range []string{"gpu-cdi-plugin", "device-manager", "prestart-hook", "launcher"} {
		out, err := proc.Output(t.Context(), "go", "version", "-m", shared.Program(t, name))
		testenv.Must(t, err)
		for line := range strings.Lines(out) {
			fields := strings.Fields(line)
			if len(fields) < 3 || fields[0] != "dep" {
				continue
			}
			if listed[fields[1]] != fields[2] || !strings.Contains(licences, fields[1]+" "+fields[2]+": ") {
				t.Errorf("%s %s of %s is not listed, or its licence is missing", fields[1], fields[2], name)
			}
		}
	}
	if listed["stdlib"] == "" || listed["google.golang.org/grpc"] == "" {
		t.Errorf("the list has %v", listed)
	}
}

// TestSlowAReleaseDocumentsEachVerb compares the manual pages with the golden help texts.
func TestSlowAReleaseDocumentsEachVerb(t *testing.T) {
	top := "gpu-cdi-plugin_1.2.3_linux_amd64"
	files := untar(t, gunzip(t, readFile(t, releaseDir(t), top+".tar.gz")))
	if program := files[top+"/gpu-run"]; string(program) != "device-manager" {
		t.Errorf("gpu-run is %q", program)
	}
	for page, want := range map[string]string{
		"man5/gpu-cdi-plugin.5": "\n\\&state\\-dir: /var/lib/gpu\\-cdi\\-plugin\n",
		"man5/device-manager.5": "\n\\&state\\-dir: /var/lib/device\\-manager\n",
		"man8/prestart-hook.8":  "\n\\&POLICY\n\\&  /etc/gpu\\-cdi\\-plugin/hook.yaml,",
	} {
		if text := files[path.Join(top, "reference", page)]; !bytes.Contains(text, []byte(want)) {
			t.Errorf("the manual page %s lacks %q:\n%.600s", page, want, text)
		}
	}
	for _, program := range []string{"gpu-cdi-plugin", "device-manager", "gpu-run"} {
		for _, name := range []string{"bash/" + program, "zsh/_" + program, "fish/" + program + ".fish"} {
			if !bytes.Contains(files[path.Join(top, "reference", name)], []byte(program)) {
				t.Errorf("the completion %s is missing", name)
			}
		}
	}
	for _, program := range []string{"gpu-cdi-plugin", "device-manager"} {
		helps, err := filepath.Glob("../../cmd/" + program + "/testdata/help/*.txt")
		testenv.Must(t, err)
		if len(helps) < 10 {
			t.Errorf("%s has the help texts %q", program, helps)
		}
		for _, help := range helps {
			verb := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(help), "help.txt"), "-")
			name := strings.TrimSuffix(program+"-"+verb, "-")
			if verb == "gpu-run" {
				name = verb
			}
			page := string(files[path.Join(top, "reference/man1", name+".1")])
			first, _, _ := strings.Cut(string(readFile(t, help)), "\n")
			plain := strings.NewReplacer(`\-`, "-", `\fB`, "", `\fP`, "").Replace(page)
			if !strings.Contains(plain, strings.TrimSuffix(first, ".")) || !strings.Contains(plain, "EXIT STATUS") {
				t.Errorf("the manual page of %s lacks %q, or its exit statuses:\n%.600s", name, first, plain)
			}
		}
	}
}

// TestSlowAReleaseHasTheGuides: help and error texts name them.
func TestSlowAReleaseHasTheGuides(t *testing.T) {
	dir := releaseDir(t)
	var lists []string
	for _, name := range []string{"gpu-cdi-plugin", "device-manager"} {
		deb := filepath.Join(dir, name+"_1.2.3_amd64.deb")
		lists = append(lists, proc.Must(t, 0, proc.Cmd{Args: []string{"dpkg-deb", "--contents", deb}}).Stdout)
	}
	archive := filepath.Join(dir, "gpu-cdi-plugin_1.2.3_linux_amd64.tar.gz")
	lists = append(lists, proc.Must(t, 0, proc.Cmd{Args: []string{"tar", "-tf", archive}}).Stdout)
	guides, err := filepath.Glob("../../docs/*.md")
	testenv.Must(t, err)
	want := []string{"/README.md", "/CHANGELOG.md", "/docs/overview.svg", "/specs/config.schema.json"}
	for _, guide := range guides {
		want = append(want, "/docs/"+filepath.Base(guide))
	}
	for _, list := range lists {
		for _, name := range want {
			if !strings.Contains(list, name+"\n") {
				t.Errorf("%s is missing in\n%.400s", name, list)
			}
		}
	}
	for _, list := range lists[1:] { // the package gpu-cdi-plugin has no such API
		if !strings.Contains(list, "/specs/manager.openapi.yaml\n") {
			t.Errorf("the API of the device manager is missing in\n%.400s", list)
		}
	}
}

// manifest is what the tests read of an OCI index or manifest.
type manifest struct {
	Manifests []struct {
		Digest   string
		Platform struct{ Architecture string }
	}
	Config struct{ Digest string }
	Layers []struct {
		Digest string
		Size   int64
	}
}

// mostLayer is the maximum size of an image, compressed, in bytes.
const mostLayer = 11 << 20

// releasedImage is the image of the release.
type releasedImage struct {
	files         map[string][]byte
	architectures []string
	manifests     []manifest // one for each architecture
}

func readImage(t *testing.T) releasedImage {
	t.Helper()
	image := releasedImage{
		files: untar(t, bytes.NewReader(readFile(t, releaseDir(t), "gpu-cdi-plugin_1.2.3_image.tar"))),
	}
	read := func(data []byte) (m manifest) {
		t.Helper()
		testenv.Must(t, json.Unmarshal(data, &m))
		return m
	}
	outer := read(image.files["index.json"])
	if len(outer.Manifests) != 1 {
		t.Fatalf("index.json has %d entries, and engines take one", len(outer.Manifests))
	}
	for _, one := range read(image.blob(outer.Manifests[0].Digest)).Manifests {
		image.architectures = append(image.architectures, one.Platform.Architecture)
		image.manifests = append(image.manifests, read(image.blob(one.Digest)))
	}
	return image
}

// blob returns a manifest or a layer by its digest.
func (i releasedImage) blob(digest string) []byte {
	return i.files["blobs/sha256/"+strings.TrimPrefix(digest, "sha256:")]
}

func TestSlowTheImageHasOurProgramsAndNothingElse(t *testing.T) {
	image := readImage(t)
	for i, arch := range image.architectures {
		layers := image.manifests[i].Layers
		if len(layers) != 1 || layers[0].Size > mostLayer {
			t.Fatalf("the layers for %s are %v", arch, layers)
		}
		t.Logf("%s: %.1f MB compressed", arch, float64(layers[0].Size)/1e6)
		layer := untar(t, gunzip(t, image.blob(layers[0].Digest)))
		want := []string{"LICENCES", "LICENSE", "gpu-cdi-plugin", "launcher", "prestart-hook"}
		if got := slices.Sorted(maps.Keys(layer)); !slices.Equal(got, want) {
			t.Errorf("the image for %s has %q", arch, got)
		}
	}
	if !slices.Equal(slices.Sorted(slices.Values(image.architectures)), []string{"amd64", "arm64"}) {
		t.Errorf("the image has the architectures %q", image.architectures)
	}
}

// readers are programs of distributions that read one kind of the files of a release to its end. In each command FILE
// is such a file.
var readers = map[string]struct {
	files   string // a pattern
	command []string
}{
	"GNU tar reads the archives": {"*.tar.gz", []string{"tar", "-tf", "FILE"}},
	"GNU tar reads the chart":    {"*.tgz", []string{"tar", "-tf", "FILE"}},
	"GNU tar reads the image":    {"*.tar", []string{"tar", "-tf", "FILE"}},
	"GNU tar reads the layers":   {"*.layer", []string{"tar", "-tzf", "FILE"}},
	"Python reads the archives":  {"*.tar.gz", []string{"python3", "-c", readByPython, "FILE"}},
	"Python reads the chart":     {"*.tgz", []string{"python3", "-c", readByPython, "FILE"}},
	"Python reads the image":     {"*.tar", []string{"python3", "-c", readByPython, "FILE"}},
	"Python reads the layers":    {"*.layer", []string{"python3", "-c", readByPython, "FILE"}},
	"dpkg reads the debs":        {"*.deb", []string{"dpkg-deb", "--contents", "FILE"}},
	"rpm checks the rpms":        {"*.rpm", []string{"rpm", "--checksig", "--nosignature", "FILE"}},
	"rpm reads the rpms":         {"*.rpm", []string{"rpm", "--query", "--list", "--package", "FILE"}},
}

const readByPython = `import sys, tarfile
with tarfile.open(sys.argv[1]) as archive:
    for member in archive:
        if member.isfile():
            archive.extractfile(member).read()
`

// TestSlowOtherProgramsReadTheRelease has each file of the release read by other programs than those of Go, which take
// archives without an end too.
func TestSlowOtherProgramsReadTheRelease(t *testing.T) {
	layers, image := t.TempDir(), readImage(t)
	for i, arch := range image.architectures {
		layer := image.blob(image.manifests[i].Layers[0].Digest)
		testenv.Must(t, os.WriteFile(filepath.Join(layers, arch+".layer"), layer, 0o644))
	}
	for name, r := range readers {
		t.Run(name, func(t *testing.T) {
			testenv.Command(t, r.command[0])
			released, err := filepath.Glob(filepath.Join(releaseDir(t), r.files))
			testenv.Must(t, err)
			unpacked, err := filepath.Glob(filepath.Join(layers, r.files))
			testenv.Must(t, err)
			files := append(released, unpacked...)
			if len(files) == 0 {
				t.Errorf("the release has no %s", r.files)
			}
			for _, file := range files {
				command := slices.Clone(r.command)
				command[len(command)-1] = file
				// Where rpm finds no database, it makes one in the home directory.
				env := append(os.Environ(), "HOME="+t.TempDir())
				if out := proc.Must(t, 0, proc.Cmd{Args: command, Env: env}); out.Stderr != "" {
					t.Errorf("%s: %v", filepath.Base(file), out)
				}
			}
		})
	}
}

// newHostForRelease is a simulated host on which a release runs. It has libraries that newer C libraries keep only for
// older programs.
func newHostForRelease(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	for _, name := range []string{"libdl.so.2", "libpthread.so.0", "libresolv.so.2"} {
		found, err := filepath.Glob("/lib/*-linux-gnu/" + name)
		testenv.Must(t, err)
		for _, path := range found {
			testenv.Must(t, os.MkdirAll(filepath.Join(h.root, filepath.Dir(path)), 0o755))
			testenv.Must(t, os.WriteFile(filepath.Join(h.root, path), readFile(t, path), 0o755))
		}
	}
	return h
}

// TestSlowPodmanRunsTheImage loads the image into podman, and has it read a simulated host.
func TestSlowPodmanRunsTheImage(t *testing.T) {
	podman := testenv.Command(t, "podman")
	h := newHostForRelease(t)
	// crun does not start where both versions of cgroups are mounted.
	storage := []string{
		podman, "--root", t.TempDir(), "--runroot", t.TempDir(), "--storage-driver", "vfs",
		"--cgroup-manager", "cgroupfs", "--runtime", testenv.Command(t, "runc"),
	}
	run := func(args ...string) proc.Result {
		t.Helper()
		return proc.Must(t, 0, proc.Cmd{Args: append(slices.Clone(storage), args...)})
	}
	parent := fmt.Sprintf("/gpu-dist-%d", os.Getpid())
	t.Cleanup(func() { testenv.Must(t, engine.RemoveCgroups(parent)) })
	loaded := run("load", "-i", filepath.Join(releaseDir(t), "gpu-cdi-plugin_1.2.3_image.tar"))
	_, name, _ := strings.Cut(strings.TrimSpace(loaded.Stdout), "Loaded image: ")
	// Without CAP_SYS_RESOURCE podman's default limits cannot be set.
	r := run("run", "--rm", "--network", "none", "--pids-limit", "-1", "--privileged", "--cgroup-parent", parent,
		"--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "-v", h.root+":/host:rslave",
		name, "run", "devices", "-o", "name")
	if !strings.HasPrefix(r.Stdout, "nvidia.com/gpu=GPU-") {
		t.Errorf("the devices are %v", r)
	}
}

// TestSlowContainerdRunsTheImage imports the image into containerd by both of ctr's ways, also for the architecture
// that is not the host's, and has it read a simulated host.
func TestSlowContainerdRunsTheImage(t *testing.T) {
	runc := testenv.Command(t, "runc")
	h := newHostForRelease(t)
	archive := filepath.Join(releaseDir(t), "gpu-cdi-plugin_1.2.3_image.tar")
	for name, options := range map[string]string{
		"in the server": "", "in the client": "--local", "for all architectures": "--all-platforms",
	} {
		t.Run(name, func(t *testing.T) {
			script := "ctr images import " + options + ` "$1" >&2
				exec ctr run --rm --privileged --runc-binary "$2" --cgroup "$3" \
					--mount "type=bind,src=$4,dst=/host,options=rbind:rslave" \
					localhost/gpu-cdi-plugin:1.2.3 image /launcher run devices -o name`
			r := proc.Must(t, 0, proc.Cmd{Args: engine.BesideContainerd(t, shared.NodePeer(t, "containerd"), t.TempDir(),
				"sh", "-e", "-c", script, "sh", archive, runc, fmt.Sprintf("/gpu-test-%d/image", os.Getpid()), h.root)})
			if !strings.HasPrefix(r.Stdout, "nvidia.com/gpu=GPU-") {
				t.Errorf("the devices are %v", r)
			}
		})
	}
}

// tagged is a repository of its own with a copy of the tree, whose only commit has the tag of the release, and with the
// release that the commands of docs/releasing.md made there. All tests share it.
var tagged struct {
	once sync.Once
	tree string
}

func taggedTree(t *testing.T) string {
	t.Helper()
	tagged.once.Do(func() {
		root, err := suite.Root()
		testenv.Must(t, err)
		dir, err := os.MkdirTemp(tempDir, "tagged-") //nolint:usetesting // later tests use it too
		testenv.Must(t, err)
		const copyTree = `git ls-files --cached --others --exclude-standard -z |
			tar --create --null --files-from - --ignore-failed-read | tar --extract --directory "$0"`
		proc.Must(t, 0, proc.Cmd{Args: []string{"sh", "-c", copyTree, dir}, Dir: root})
		tr := tree{t, dir}
		tr.next(number)
		tr.run("git", "init", "--quiet")
		tr.commit()
		tr.run("sh", "-ec", guide.First(t, "docs/releasing.md"))
		tagged.tree = dir
	})
	if tagged.tree == "" {
		t.Fatal("the release in a tagged tree could not be made: see the first test that needs it")
	}
	return tagged.tree
}

// TestSlowEqualTreesGiveEqualReleases makes a release of a copy of the tree, in another directory. The compiler of the
// copy has another path too, so all C code is compiled again.
func TestSlowEqualTreesGiveEqualReleases(t *testing.T) {
	before, after := releaseDir(t), filepath.Join(taggedTree(t), "dist")
	if diff := cmp.Diff(files(t, before), files(t, after)); diff != "" {
		t.Errorf("-first +second:\n%s", diff)
	}
}
