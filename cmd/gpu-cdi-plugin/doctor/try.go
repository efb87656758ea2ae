package doctor

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/hook/check"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
)

// TryOptions say which container is started.
type TryOptions struct {
	// Engine is one of TryEngines, and Device the qualified name of a CDI device.
	Engine, Device string
	// Hook is the path of prestart-hook, which is the container's only program.
	Hook string
	// CDIDirs are the directories of CDI specs, the lowest priority first.
	CDIDirs []string
}

// ErrNoEngine means that the engine's program was not found.
var ErrNoEngine = errors.New("the engine is not installed")

const (
	// tryTime bounds the load and the run of the container, and cleanTime its removal.
	tryTime   = time.Minute
	cleanTime = 20 * time.Second
	// maxOutput bounds what the engine and the container print, in bytes.
	maxOutput = 4 << 20
	// tryPath is the path of the program in the container.
	tryPath = "/prestart-hook"
)

// tryEngine loads an image and runs a container of it. The image and the container have names of their own.
type tryEngine struct {
	name string
	// start returns what the container prints. An error says why there is no container.
	start func(ctx context.Context, t *try, archive []byte, device string) ([]byte, error)
	// clean removes the container and the image, if they are there.
	clean func(ctx context.Context, t *try)
}

// tryEngines are the engines that can be tried.
var tryEngines = []tryEngine{
	{"podman", startLikeDocker, cleanLikeDocker},
	{"docker", startLikeDocker, cleanLikeDocker},
	{"nerdctl", startLikeDocker, cleanLikeDocker},
	{"crictl", startCRI, cleanCRI},
}

func startLikeDocker(ctx context.Context, t *try, archive []byte, device string) ([]byte, error) {
	if _, err := t.execute(ctx, t.program, archive, "load"); err != nil {
		return nil, fmt.Errorf("the image cannot be loaded: %w", err)
	}
	return t.execute(ctx, t.program, nil, "run", "--rm", "--name", t.name, "--network", "none", "--device", device,
		t.image(), tryPath, "check", "-o", "json")
}

func cleanLikeDocker(ctx context.Context, t *try) {
	_, _ = t.execute(ctx, t.program, nil, "rm", "--force", t.name) // usually it has removed itself
	_, _ = t.execute(ctx, t.program, nil, "rmi", "--force", t.image())
}

// startCRI runs a pod on the node's own network, so that it needs none of the cluster. It has no image loader: the
// image goes into the store of containerd, or of CRI-O by podman.
func startCRI(ctx context.Context, t *try, archive []byte, device string) ([]byte, error) {
	version, err := t.execute(ctx, t.program, nil, "version")
	if err != nil {
		return nil, err
	}
	load := []string{"ctr", "--namespace", "k8s.io", "images", "import", "-"}
	if bytes.Contains(version, []byte("cri-o")) { // a docker beside it has ctr too
		load = []string{"podman", "load"}
	}
	if _, err := t.execute(ctx, load[0], archive, load[1:]...); err != nil {
		return nil, fmt.Errorf("the image cannot be loaded: %w", err)
	}
	pod, container, err := t.writeCRI(device)
	if err != nil {
		return nil, err
	}
	podID, err := t.execute(ctx, t.program, nil, "runp", pod)
	if err != nil {
		return nil, err
	}
	id, err := t.execute(ctx, t.program, nil, "create", "--no-pull", strings.TrimSpace(string(podID)), container, pod)
	if err != nil {
		return nil, err
	}
	if _, err := t.execute(ctx, t.program, nil, "start", strings.TrimSpace(string(id))); err != nil {
		return nil, err
	}
	return t.execute(ctx, t.program, nil, "logs", "--follow", strings.TrimSpace(string(id))) // until it ends
}

// writeCRI writes the requests for a pod and its container, as the CRI defines them, into files.
func (t *try) writeCRI(device string) (pod, container string, err error) {
	const ofContainer, ofNode = 1, 2 // NamespaceMode
	type object = map[string]any
	// As the kubelet asks by default. For a PID namespace of the pod CRI-O would start a pause container.
	linux := object{"security_context": object{"namespace_options": object{"network": ofNode, "pid": ofContainer}}}
	for name, content := range map[string]object{
		"pod.json": {
			"metadata":      object{"name": t.name, "namespace": "default", "uid": t.name, "attempt": 1},
			"log_directory": t.dir,
			"linux":         linux,
		},
		"container.json": {
			"metadata": object{"name": "check"}, "image": object{"image": t.image()}, "log_path": "check.log",
			"command": []string{tryPath, "check", "-o", "json"}, "CDI_devices": []object{{"name": device}},
			"linux": linux,
		},
	} {
		data, err := json.Marshal(content)
		if err == nil {
			err = os.WriteFile(filepath.Join(t.dir, name), data, 0o600)
		}
		if err != nil {
			return "", "", fmt.Errorf("describe the container: %w", err)
		}
	}
	return filepath.Join(t.dir, "pod.json"), filepath.Join(t.dir, "container.json"), nil
}

func cleanCRI(ctx context.Context, t *try) {
	ids, _ := t.execute(ctx, t.program, nil, "pods", "--name", t.name, "--quiet")
	for id := range strings.FieldsSeq(string(ids)) {
		_, _ = t.execute(ctx, t.program, nil, "rmp", "--force", id)
	}
	_, _ = t.execute(ctx, t.program, nil, "rmi", t.image())
}

// TryEngines returns the names of the engines that can be tried.
func TryEngines() []string {
	var names []string
	for _, e := range tryEngines {
		names = append(names, e.name)
	}
	return names
}

// Try starts a container with a device, and returns findings about what it cannot use. The container and its image are
// removed again. An error means that nothing was tried.
func Try(ctx context.Context, o TryOptions) (list []Finding, err error) {
	i := slices.IndexFunc(tryEngines, func(e tryEngine) bool { return e.name == o.Engine })
	if i < 0 {
		return nil, fmt.Errorf("unknown engine %q", o.Engine)
	}
	program, err := exec.LookPath(o.Engine)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoEngine, err)
	}
	hook, err := fileio.ReadFile(o.Hook, maxFile)
	if err != nil {
		return nil, fmt.Errorf("read the program for the container: %w", err)
	}
	dir, err := os.MkdirTemp("", "gpu-cdi-try-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the container's description: %w", err)
	}
	defer os.RemoveAll(dir)
	t := &try{engine: o.Engine, program: program, name: fmt.Sprintf("gpu-cdi-try-%d", os.Getpid()), dir: dir}
	archive, err := imageArchive(t.image(), hook)
	if err != nil {
		return nil, err
	}
	cleanCtx := context.WithoutCancel(ctx)
	ctx, cancel := context.WithTimeout(ctx, tryTime)
	defer cancel()
	out, err := tryEngines[i].start(ctx, t, archive, o.Device)
	t.clean(cleanCtx, tryEngines[i])
	var report check.Report
	if jsonErr := json.Unmarshal(out, &report); jsonErr != nil {
		return []Finding{newFinding("try-failed", o.Engine, wording.OneLine(cmp.Or(err, jsonErr)))}, nil
	}
	return t.compare(&report, cdi.Load(o.CDIDirs...), o.Device), nil
}

// try is one try.
type try struct {
	engine, program string
	name            string // of the container
	dir             string // for files
}

func (t *try) image() string { return "localhost/" + t.name + ":try" }

// clean has a time of its own, since the try may have used up its own.
func (t *try) clean(ctx context.Context, e tryEngine) {
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	e.clean(ctx, t)
}

// limited drops what is written beyond a limit.
type limited struct {
	buffer bytes.Buffer // not embedded: its ReadFrom has no limit
	left   int
}

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	_, _ = l.buffer.Write(p[:n]) // a buffer does not fail
	return len(p), nil
}

// execute runs the engine, which the user has named and asked for, with the user's rights and environment. It returns
// what the engine printed. The error is its message.
func (t *try) execute(ctx context.Context, program string, stdin []byte, args ...string) ([]byte, error) {
	stdout, stderr := &limited{left: maxOutput}, &limited{left: maxOutput}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second // a child of the engine may keep the pipes open
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("%s %s did not end: %w", t.engine, args[0], ctx.Err())
	case err != nil:
		if text := messageOf(stderr.buffer.String()); text != "" {
			err = errors.New(text)
		}
	}
	return stdout.buffer.Bytes(), err
}

// messageOf returns the last line of an engine's standard error. docker adds where its help is.
func messageOf(stderr string) (last string) {
	for line := range strings.Lines(stderr) {
		if line = strings.TrimSpace(line); line != "" && !strings.Contains(line, " --help'") {
			last = line
		}
	}
	return last
}

// compare returns findings about what the container reports, and about what the spec gives and the container lacks.
func (t *try) compare(r *check.Report, dirs *cdi.SpecDirs, device string) []Finding {
	var list []Finding
	for i, p := range r.Problems {
		same := func(other check.Problem) bool { return other.Problem == p.Problem && other.Fix == p.Fix }
		if slices.ContainsFunc(r.Problems[:i], same) {
			continue // listed with the first one
		}
		var subjects []string
		for _, other := range r.Problems[i:] {
			if same(other) {
				subjects = append(subjects, other.Subject)
			}
		}
		if strings.Contains(p.Fix, "gpu-cdi-plugin doctor") { // this is it
			p.Fix = ""
		}
		problem := wording.ShortenList(subjects, 3, ", ") + " in the container: " + p.Problem
		list = append(list, newFinding("try-differs", t.engine, problem).fixed(p.Fix))
	}
	var lacking []string
	for _, node := range nodesOf(dirs, device) {
		if !slices.ContainsFunc(r.Nodes, func(n check.Node) bool { return n.Path == node }) {
			lacking = append(lacking, node)
		}
	}
	if lacking != nil {
		problem := "the container lacks " + wording.ShortenList(lacking, 3, ", ") + ", which the spec of " + device + " gives"
		list = append(list, newFinding("try-differs", t.engine, problem))
	}
	return list
}

// nodesOf returns NVIDIA's device nodes that the spec of a device gives.
func nodesOf(dirs *cdi.SpecDirs, device string) []string {
	var list []string
	for _, file := range dirs.FilesOf([]string{device}) {
		if file.Spec == nil {
			continue
		}
		edits := file.Spec.ContainerEdits.DeviceNodes
		for i := range file.Spec.Devices {
			if d := &file.Spec.Devices[i]; file.Kind+"="+d.Name == device {
				edits = append(slices.Clip(edits), d.ContainerEdits.DeviceNodes...)
			}
		}
		for _, n := range edits {
			if strings.HasPrefix(n.Path, "/dev/nvidia") {
				list = append(list, n.Path)
			}
		}
	}
	return list
}

// imageArchive returns an image that has only the program, as the archive that "docker save" writes and every engine
// loads.
func imageArchive(name string, program []byte) ([]byte, error) {
	layer, err := tarOf([]tarFile{{tryPath[1:], 0o755, program}})
	if err != nil {
		return nil, err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": nil, "Cmd": []string{tryPath, "check"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
	})
	if err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	configName := digest(config) + ".json"
	manifest, err := json.Marshal([]map[string]any{{
		"Config": configName, "RepoTags": []string{name}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	return tarOf([]tarFile{{configName, 0o644, config}, {"layer.tar", 0o644, layer}, {"manifest.json", 0o644, manifest}})
}

type tarFile struct {
	name string
	mode int64
	data []byte
}

func tarOf(files []tarFile) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		err := w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = w.Write(f.data)
		}
		if err != nil {
			return nil, fmt.Errorf("make the image: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("make the image: %w", err)
	}
	return b.Bytes(), nil
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
