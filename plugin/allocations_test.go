package plugin

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/resource"
)

// mountOf allocates and returns the mount of the file, and what it says.
func mountOf(t *testing.T, s *server, ids ...string) (*v1beta1.Mount, string) {
	t.Helper()
	resp, err := allocated(s, allocate(ids...))
	must(t, err)
	m := resp.ContainerResponses[0].Mounts[0]
	want := []*v1beta1.Mount{
		{ContainerPath: "/run/gpu/allocation.json", HostPath: m.HostPath, ReadOnly: true},
		{ContainerPath: "/run/gpu/allocations/" + strings.Replace(s.name(), "/", "_", 1) + ".json", HostPath: m.HostPath, ReadOnly: true},
	}
	if diff := cmp.Diff(want, resp.ContainerResponses[0].Mounts, protocmp.Transform()); diff != "" {
		t.Errorf("the mounts (-want +got):\n%s", diff)
	}
	content, err := os.ReadFile(m.HostPath)
	must(t, err)
	return m, string(content)
}

func described(t *testing.T, r resource.Resource) (*server, string) {
	t.Helper()
	a := answers(CDICRI)
	a.AllocationDir = filepath.Join(t.TempDir(), "allocations")
	return serverOf(t, r, a), a.AllocationDir
}

func TestAContainerCanReadWhatItWasGiven(t *testing.T) {
	mig, shared, lone := migOf(1), replicasOf(1, 2), gpusOf(1)
	lone.Devices[0].NUMANode = gpu.NoNUMANode
	cases := map[string]struct {
		r    resource.Resource
		id   string
		want string
	}{
		"a GPU": {gpusOf(8), uuid(4), `{"version":1,"resource":"nvidia.com/gpu","devices":[{"id":"` + uuid(4) + `","uuid":"` + uuid(4) +
			`","index":"4","model":"NVIDIA H100 80GB HBM3","pciBusID":"0000:05:00.0","numaNode":1,"memoryBytes":85899345920}]}`},
		"a GPU of no NUMA node": {lone, uuid(0), `{"version":1,"resource":"nvidia.com/gpu","devices":[{"id":"` + uuid(0) + `","uuid":"` + uuid(0) +
			`","index":"0","model":"NVIDIA H100 80GB HBM3","pciBusID":"0000:01:00.0","memoryBytes":85899345920}]}`},
		"a MIG device": {mig, mig.Devices[1].ID, `{"version":1,"resource":"nvidia.com/mig-1g.10gb","devices":[{"id":"` + mig.Devices[1].ID + `","uuid":"` + mig.Devices[1].ID +
			`","parent":"` + uuid(0) + `","index":"0:1","model":"NVIDIA H100 80GB HBM3","profile":"1g.10gb","pciBusID":"0000:01:00.0","numaNode":0,"memoryBytes":85899345920}]}`},
		"a replica": {shared, shared.Devices[0].ID, `{"version":1,"resource":"nvidia.com/gpu.shared","devices":[{"id":"` + shared.Devices[0].ID + `","uuid":"` + uuid(0) +
			`","index":"0","model":"NVIDIA H100 80GB HBM3","pciBusID":"0000:01:00.0","numaNode":0,"memoryBytes":85899345920,"replica":0}]}`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s, dir := described(t, c.r)
			m, content := mountOf(t, s, c.id)
			if filepath.Dir(m.HostPath) != dir {
				t.Errorf("the file is %s, want one in %s", m.HostPath, dir)
			}
			var compact, expected any
			must(t, json.Unmarshal([]byte(content), &compact))
			must(t, json.Unmarshal([]byte(c.want), &expected))
			if diff := cmp.Diff(expected, compact); diff != "" {
				t.Errorf("the file (-want +got):\n%s", diff)
			}
			info, err := os.Stat(m.HostPath)
			must(t, err)
			if info.Mode().Perm() != 0o644 {
				t.Errorf("mode %o, want 644: not every container runs as root", info.Mode().Perm())
			}
		})
	}
}

func TestAContainerCanReadWhatItWasGivenBesides(t *testing.T) {
	s, _ := described(t, gpusOf(1))
	gds := &specs.Spec{Kind: "nvidia.com/gds", Devices: []specs.Device{{Name: "all"}}}
	imex := &specs.Spec{Kind: "nvidia.com/imex-channel", Devices: []specs.Device{{Name: "0"}, {Name: "7"}}}
	given := []*specs.Spec{gds, imex}
	s.answers.Extras = func() []*specs.Spec { return given }
	extras := func() []AllocatedExtra {
		_, content := mountOf(t, s, uuid(0))
		var a Allocation
		must(t, json.Unmarshal([]byte(content), &a))
		return a.Extras
	}
	want := []AllocatedExtra{{Kind: "nvidia.com/gds", Names: []string{"all"}}, {Kind: "nvidia.com/imex-channel", Names: []string{"0", "7"}}}
	if diff := cmp.Diff(want, extras()); diff != "" {
		t.Errorf("extras (-want +got):\n%s", diff)
	}
	given = given[:1]
	if diff := cmp.Diff(want[:1], extras()); diff != "" {
		t.Errorf("extras after one is gone (-want +got):\n%s", diff)
	}
}

func TestTheSameDevicesHaveTheSameFile(t *testing.T) {
	s, dir := described(t, gpusOf(4))
	first, content := mountOf(t, s, uuid(2), uuid(0))
	again, _ := mountOf(t, s, uuid(0), uuid(2))
	if first.HostPath != again.HostPath || len(inDir(t, dir)) != 1 {
		t.Errorf("%s and %s, %v", first.HostPath, again.HostPath, inDir(t, dir))
	}
	other, _ := mountOf(t, s, uuid(0))
	if other.HostPath == first.HostPath {
		t.Error("other devices have the same file")
	}
	// It comes back if it was removed, also if a runtime then made a directory of it.
	must(t, os.Remove(first.HostPath))
	mountOf(t, s, uuid(0), uuid(2))
	must(t, os.Remove(first.HostPath))
	must(t, os.Mkdir(first.HostPath, 0o755))
	if back, now := mountOf(t, s, uuid(0), uuid(2)); back.HostPath != first.HostPath || now != content {
		t.Errorf("%s, %s", back.HostPath, now)
	}
	// Another process comes to the same name.
	a := s.answers
	if m, _ := mountOf(t, serverOf(t, gpusOf(4), a), uuid(0), uuid(2)); m.HostPath != first.HostPath {
		t.Errorf("%s, want %s", m.HostPath, first.HostPath)
	}
}

// Long after the last change of the directory requests only ask the directory that was kept.
func TestAFileThatIsGoneComesBackAlsoIfItWasThereForLong(t *testing.T) {
	for name, do := range map[string]func(file, dir string) error{
		"removed":                      func(file, _ string) error { return os.Remove(file) },
		"moved away":                   func(file, dir string) error { return os.Rename(file, filepath.Join(dir, "old")) },
		"its directory is removed":     func(_, dir string) error { return os.RemoveAll(dir) },
		"its directory is moved away":  func(_, dir string) error { return os.Rename(dir, dir+".old") },
		"another directory in place":   func(_, dir string) error { return errors.Join(os.Rename(dir, dir+".old"), os.Mkdir(dir, 0o755)) },
		"a directory of the same name": func(file, _ string) error { return errors.Join(os.Remove(file), os.Mkdir(file, 0o755)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, dir := described(t, gpusOf(4))
			var m *v1beta1.Mount
			for range 2 { // also after it came back once
				for range 3 { // written, kept, asked
					m, _ = mountOf(t, s, uuid(0))
					time.Sleep(200 * time.Millisecond)
				}
				l := s.list.Load()
				devices, err := l.find([]string{uuid(0)})
				must(t, err)
				if seen := l.answered.get(keyOf(nil, devices)).file.seen.Load(); seen == nil || seen.dir != fileid.Of(dir) {
					t.Fatalf("the file is looked up each time: %v", seen)
				}
				must(t, do(m.HostPath, dir))
				mountOf(t, s, uuid(0)) // reads it
				_ = os.RemoveAll(dir + ".old")
			}
		})
	}
}

// That what leads to the directory is another does not show on the directory.
func TestAFileComesBackWhenWhatLeadsToItIsMoved(t *testing.T) {
	t.Parallel()
	parent := filepath.Join(t.TempDir(), "parent")
	a := answers(CDICRI)
	a.AllocationDir = filepath.Join(parent, "allocations")
	s := serverOf(t, gpusOf(1), a)
	for range 3 { // written, kept, asked
		mountOf(t, s, uuid(0))
		time.Sleep(200 * time.Millisecond)
	}
	must(t, os.Rename(parent, parent+".old"))
	time.Sleep(lookTime)
	mountOf(t, s, uuid(0)) // reads it
}

func TestAFileThatIsThereIsWrittenOnlyIfItIsDamaged(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(file string) error
		again  bool
	}{
		"left alone":       {func(string) error { return nil }, false},
		"cut short":        {func(f string) error { return os.Truncate(f, 10) }, true},
		"other text":       {func(f string) error { return writeOver(f, "[") }, true},
		"not for everyone": {func(f string) error { return os.Chmod(f, 0o600) }, true},
		"a link": {func(f string) error {
			return errors.Join(os.Rename(f, f+".old"), os.Symlink(f+".old", f))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := described(t, gpusOf(4))
			m, content := mountOf(t, s, uuid(0))
			before := fileid.Of(m.HostPath)
			must(t, c.damage(m.HostPath))
			// Another process comes to the same file.
			_, now := mountOf(t, serverOf(t, gpusOf(4), s.answers), uuid(0))
			if again := fileid.Of(m.HostPath).Ino != before.Ino; now != content || again != c.again {
				t.Errorf("written again: %v; it says %s", again, now)
			}
			info, err := os.Lstat(m.HostPath)
			must(t, err)
			if info.Mode() != 0o644 {
				t.Errorf("mode %v", info.Mode())
			}
		})
	}
}

// writeOver writes over the beginning of a file.
func writeOver(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// An answer is in the kubelet's checkpoint a moment later only, and the file must not look old until then.
func TestAFileThatIsGivenAgainIsNotSweptAway(t *testing.T) {
	for name, again := range map[string]func(*server) *server{
		"by the same plugin": func(s *server) *server { return s },
		"by the next one":    func(s *server) *server { return serverOf(t, gpusOf(4), s.answers) },
	} {
		t.Run(name, func(t *testing.T) {
			s, dir := described(t, gpusOf(4))
			m, _ := mountOf(t, s, uuid(0))
			old := time.Now().Add(-2 * sweepAge)
			must(t, os.Chtimes(m.HostPath, old, old))
			checkpoint := filepath.Join(t.TempDir(), checkpointName)
			must(t, os.WriteFile(checkpoint, checkpointOf(t), 0o600))
			mountOf(t, again(s), uuid(0))
			must(t, (&sweeper{dir: dir, checkpoint: checkpoint, log: quiet}).sweep(time.Now()))
			if _, err := os.Stat(m.HostPath); err != nil {
				t.Errorf("the file that was given: %v", err)
			}
		})
	}
}

// checkpointOf is a kubelet's checkpoint with an allocation that mounts the paths.
func checkpointOf(t testing.TB, paths ...string) []byte {
	t.Helper()
	answer := &v1beta1.ContainerAllocateResponse{}
	for _, p := range paths {
		answer.Mounts = append(answer.Mounts, &v1beta1.Mount{ContainerPath: AllocationPath, HostPath: p})
	}
	data, err := proto.Marshal(answer)
	must(t, err)
	return fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[{"PodUID":"7f","ContainerName":"c","ResourceName":"nvidia.com/gpu",`+
		`"DeviceIDs":{"0":["x"]},"AllocResp":%q}],"RegisteredDevices":{"nvidia.com/gpu":["x"]}},"Checksum":1}`, base64.StdEncoding.EncodeToString(data))
}

func TestWhoWasGivenAKind(t *testing.T) {
	answers := map[string]*v1beta1.ContainerAllocateResponse{
		"by name":       {CdiDevices: []*v1beta1.CDIDevice{{Name: "nvidia.com/gpu=0"}, {Name: "nvidia.com/gds=all"}}},
		"by annotation": {Annotations: map[string]string{"cdi.k8s.io/x": "nvidia.com/gpu=0,nvidia.com/gds=all"}},
		"with a prefix": {Annotations: map[string]string{"nvidia.cdi.k8s.io/x": "nvidia.com/gpu=0,nvidia.com/gds=all"}},
		"not at all":    {CdiDevices: []*v1beta1.CDIDevice{{Name: "nvidia.com/gds2=all"}}, Annotations: map[string]string{"x": "nvidia.com/gpu=0"}},
	}
	for name, answer := range answers {
		dir := t.TempDir()
		data, err := proto.Marshal(answer)
		must(t, err)
		text := fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[{"AllocResp":%q}]}}`, base64.StdEncoding.EncodeToString(data))
		must(t, os.WriteFile(filepath.Join(dir, checkpointName), text, 0o600))
		if given, err := Given(dir, "nvidia.com/gds"); err != nil || given != (name != "not at all") {
			t.Errorf("%s: %t, %v", name, given, err)
		}
	}
	if given, err := Given(t.TempDir(), "nvidia.com/gds"); given || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a checkpoint: %t, %v", given, err)
	}
}

func TestOldFilesGo(t *testing.T) {
	name := func(c string) string { return strings.Repeat(c, 32) + ".json" }
	held, forgotten, half := name("a"), name("b"), "."+name("c")+".123.tmp"
	everything := []string{half, held, forgotten, "other.json"}
	cases := map[string]struct {
		checkpoint func(dir string) []byte // nil: there is none
		age        time.Duration
		want       []string
		fails      bool
	}{
		"but not those that a pod has":                {func(dir string) []byte { return checkpointOf(t, dir+"/"+held) }, 2 * time.Hour, []string{held, "other.json"}, false},
		"but not new ones":                            {func(dir string) []byte { return checkpointOf(t) }, time.Minute, everything, false},
		"but not if the kubelet says nothing":         {nil, 2 * time.Hour, everything, false},
		"but not if what it says is damaged":          {func(dir string) []byte { return []byte(`{"Data":{"PodDev`) }, 2 * time.Hour, everything, true},
		"but not if it is of another form":            {func(dir string) []byte { return []byte(`{}`) }, 2 * time.Hour, everything, true},
		"but not if an allocation in it is not whole": {func(dir string) []byte { return []byte(`{"Data":{"PodDeviceEntries":[{"AllocResp":"////"}]}}`) }, 2 * time.Hour, everything, true},
	}
	for title, c := range cases {
		t.Run(title, func(t *testing.T) {
			dir := t.TempDir()
			for _, f := range everything {
				must(t, os.WriteFile(filepath.Join(dir, f), nil, 0o600))
			}
			s := sweeper{dir: dir, checkpoint: filepath.Join(t.TempDir(), checkpointName), log: quiet}
			if c.checkpoint != nil {
				must(t, os.WriteFile(s.checkpoint, c.checkpoint(dir), 0o600))
			}
			if err := s.sweep(time.Now().Add(c.age)); (err != nil) != c.fails {
				t.Errorf("sweep: %v", err)
			}
			if diff := cmp.Diff(c.want, inDir(t, dir)); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzCheckpoint(f *testing.F) {
	f.Add(checkpointOf(f, "/a", "/b"))
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"AllocResp":"////"}]}}`))
	f.Add([]byte(`{"Data":null}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		paths, err := parseCheckpoint(content)
		oneOf(t, paths != nil, err)
	})
}

func TestOldFilesThatStayAreReportedOnce(t *testing.T) {
	var log strings.Builder
	s := &sweeper{dir: "/allocations", log: slog.New(slog.NewTextHandler(&log, nil))}
	busy := errors.New("remove old allocations: busy")
	for _, err := range []error{nil, busy, busy, nil, nil} {
		s.report(err)
	}
	want := []string{"files of old allocations stay in /allocations: remove old allocations: busy", "files of old allocations in /allocations are removed again"}
	for _, line := range want {
		if n := strings.Count(log.String(), line); n != 1 {
			t.Errorf("the log says %d times: %s\n%s", n, line, &log)
		}
	}
	if n := strings.Count(log.String(), "msg="); n != len(want) {
		t.Errorf("the log has %d lines:\n%s", n, &log)
	}
}
