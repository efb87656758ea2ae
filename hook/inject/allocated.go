package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
)

// pod names a container of a pod, from the engine's annotations.
type pod struct{ namespace, name, uid, container string }

// podOf finds the pod of a container by its annotations. The container must be in that pod: the cgroup in
// linux.cgroupsPath has the pod's UID, and the kubelet has a directory for the logs of the pod with this namespace,
// name and UID. Engines get linux.cgroupsPath from the kubelet, and never from a container, an image or a checkpoint.
func (i Injector) podOf(c *container) (*pod, error) {
	if c.owner != nil && *c.owner != 0 {
		return nil, fmt.Errorf("the container's bundle belongs to user %d, who could name any pod", *c.owner)
	}
	p := &pod{}
	for _, field := range []struct {
		to               *string
		containerd, crio string // the keys of the annotations
	}{
		{&p.namespace, "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"},
		{&p.name, "io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"},
		{&p.uid, "io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"},
		{&p.container, "io.kubernetes.cri.container-name", "io.kubernetes.container.name"},
	} {
		a, isContainerd := c.annotations[field.containerd]
		b, isCRIO := c.annotations[field.crio]
		switch {
		case !isContainerd && !isCRIO:
			return nil, fmt.Errorf("the container belongs to no pod: it has neither the annotation %s nor %s",
				field.containerd, field.crio)
		case isContainerd && isCRIO && a != b: // only one engine set its annotations
			return nil, fmt.Errorf("its annotations %s and %s differ", field.containerd, field.crio)
		case isContainerd:
			*field.to = a
		default:
			*field.to = b
		}
		if !isPlainName(*field.to) {
			return nil, fmt.Errorf("its annotations name the pod with %.100q, which is not a valid name", *field.to)
		}
	}
	if !inPod(c.cgroup, p.uid) {
		return nil, fmt.Errorf("its cgroup %.200q is not that of the pod with the UID %s in its annotations",
			c.cgroup, p.uid)
	}
	dir := filepath.Join(i.PodLogs, p.namespace+"_"+p.name+"_"+p.uid)
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("the kubelet has no pod %s/%s with the UID %s: there is no directory %s",
			p.namespace, p.name, p.uid, dir)
	}
	return p, nil
}

// isPlainName reports whether a text can be a name in Kubernetes: letters, digits and hyphens, and dots except at the
// start.
func isPlainName(text string) bool {
	notPlain := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.'
	}
	return text != "" && len(text) <= 253 && !strings.HasPrefix(text, ".") && !strings.ContainsFunc(text, notPlain)
}

// inPod reports whether a container's cgroup is below its pod's: .../podUID/CONTAINER, or with systemd
// ...-podUID.slice:PREFIX:CONTAINER, where the UID has underscores for its hyphens.
func inPod(cgroup, uid string) bool {
	if slice, _, isSystemd := strings.Cut(cgroup, ":"); isSystemd {
		return strings.HasSuffix(slice, "-pod"+strings.ReplaceAll(uid, "-", "_")+".slice")
	}
	return slices.Contains(strings.Split(path.Dir(path.Clean(cgroup)), "/"), "pod"+uid)
}

// checkAllocated returns an error unless the kubelet has allocated all of the named devices to the container.
func (i Injector) checkAllocated(c *container, names []string, dirs *cdi.SpecDirs) error {
	p, err := i.podOf(c)
	if err != nil {
		return fmt.Errorf("device %s is not given: what the kubelet gave the container is unknown: %w", names[0], err)
	}
	given, err := i.allocated(p)
	if err != nil {
		return fmt.Errorf("device %s is not given: what the kubelet gave container %s of pod %s/%s is unknown: %w",
			names[0], p.container, p.namespace, p.name, err)
	}
	for _, name := range names {
		if !slices.ContainsFunc(given, func(other string) bool { return sameDevice(dirs, name, other) }) {
			return fmt.Errorf("device %s is not given: the kubelet gave container %s of pod %s/%s only %s",
				name, p.container, p.namespace, p.name, strings.Join(given, ", "))
		}
	}
	return nil
}

// sameDevice reports whether two names, such as an index and a UUID, name one device: one spec file defines both, with
// the same edits. Devices of different files are never the same, since a container also gets the common edits of each
// file.
func sameDevice(dirs *cdi.SpecDirs, name, other string) bool {
	file := fileOf(dirs, name)
	if name == other || file == nil || file != fileOf(dirs, other) {
		return name == other // cdi reports a device that does not exist
	}
	a, b := editsOf(file.Spec, name), editsOf(file.Spec, other)
	return a != nil && reflect.DeepEqual(a, b)
}

// editsOf returns the edits of a device, or nil if the spec does not define it.
func editsOf(spec *specs.Spec, name string) *specs.ContainerEdits {
	for i := range spec.Devices {
		if d := &spec.Devices[i]; spec.Kind+"="+d.Name == name {
			return &d.ContainerEdits
		}
	}
	return nil
}

const (
	// allocatedTime is how long "gpu-cdi-plugin serve" may take to answer. While one instance takes over from another,
	// nobody may answer for a moment, so the request is sent again after allocatedPause.
	allocatedTime  = 2 * time.Second
	allocatedPause = 20 * time.Millisecond
	// maxAnswer bounds the answer, in bytes.
	maxAnswer = 128 << 10
)

// allocated asks "gpu-cdi-plugin serve" which CDI devices the kubelet gave a container, and returns their qualified
// names.
func (i Injector) allocated(p *pod) ([]string, error) {
	socket := filepath.Join(i.RuntimeDir, "control.sock")
	request, err := json.Marshal(map[string]string{
		"act": "allocation", "namespace": p.namespace, "pod": p.name, "container": p.container,
	})
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	deadline := time.Now().Add(allocatedTime)
	answer, err := post(socket, request, deadline)
	for isUnanswered(err) && time.Until(deadline) > allocatedPause {
		time.Sleep(allocatedPause)
		answer, err = post(socket, request, deadline)
	}
	switch {
	case isNotServed(err):
		return nil, fmt.Errorf("gpu-cdi-plugin serve does not run: no program answers at %s", socket)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("gpu-cdi-plugin serve did not answer at %s within %v", socket, allocatedTime)
	case err != nil:
		return nil, fmt.Errorf("call gpu-cdi-plugin serve at %s: %w", socket, err)
	}
	var message struct{ Result, Error string }
	if err := json.Unmarshal(answer, &message); err != nil {
		return nil, fmt.Errorf("read the answer of gpu-cdi-plugin serve: %w", err)
	}
	switch {
	case message.Error != "":
		return nil, fmt.Errorf("gpu-cdi-plugin serve: %s", message.Error)
	case message.Result == "":
		return nil, errors.New("the answer of gpu-cdi-plugin serve is empty")
	}
	return strings.Split(message.Result, ","), nil
}

// isNotServed reports whether the error of a request means that no program listens at the socket.
func isNotServed(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED)
}

// errUnanswered means that the program at the socket ended before it answered.
var errUnanswered = errors.New("it closed the connection before it answered")

// isUnanswered reports whether another instance may answer the same request.
func isUnanswered(err error) bool {
	return isNotServed(err) || errors.Is(err, errUnanswered) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.EPIPE)
}

// post sends a request to the control socket and returns the body of the answer. It does not use net/http, which would
// double the size of this program. In HTTP 1.0 the end of the connection ends the answer.
func post(socket string, request []byte, deadline time.Time) ([]byte, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), socket)
	defer f.Close()
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, os.NewSyscallError("getsockopt", err)
	}
	if peer.Uid != 0 {
		return nil, fmt.Errorf("user %d listens there, want root", peer.Uid)
	}
	if err := f.SetDeadline(deadline); err != nil {
		return nil, err
	}
	const head = "POST /v1 HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
	if _, err := fmt.Fprintf(f, head, len(request), request); err != nil {
		return nil, err
	}
	answer, err := io.ReadAll(io.LimitReader(f, maxAnswer))
	if err != nil {
		return nil, err
	}
	header, body, found := bytes.Cut(answer, []byte("\r\n\r\n"))
	status, _, _ := bytes.Cut(header, []byte("\r\n"))
	fields := strings.Fields(string(status))
	succeeded := found && len(fields) >= 2 && fields[1] == "200"
	switch {
	case len(answer) == 0, succeeded && len(body) == 0:
		return nil, errUnanswered
	case !succeeded:
		return nil, fmt.Errorf("it answers %.100q: %.500q", status, bytes.TrimSpace(body))
	}
	return body, nil
}
