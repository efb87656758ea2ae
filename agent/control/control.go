// Package control lets an administrator send requests to the running service, over a unix socket that only root and
// the service's own user can use. Requests and answers are JSON over HTTP; an answer may begin with lines of progress.
// Another instance uses the socket to take over.
// prestart-hook uses the socket too, to ask which devices a container has. It has a client of its own (hook/inject),
// since net/http would double its size.
//
// The package only carries requests: a [Handler] carries them out. It depends on no other part of the service.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Act is the kind of a request.
type Act string

// The kinds of requests.
const (
	// Cordon takes a device out of service for a reason, until Uncordon.
	Cordon   Act = "cordon"
	Uncordon Act = "uncordon"
	// Reset resets a GPU that is not in use. With Wait it waits until the GPU is not in use.
	Reset Act = "reset"
	// Release closes the driver until Reopen.
	Release Act = "release"
	Reopen  Act = "reopen"
	// Claims returns who holds which devices, as JSON.
	Claims Act = "claims"
	// Forget has a holder of devices, as Claims names it, hold nothing until the kubelet has dropped it. With Force it
	// does so under running processes.
	Forget Act = "forget"
	// Allocation returns the qualified names of the CDI devices that the kubelet gave a container, separated by
	// commas. Only prestart-hook sends it.
	Allocation Act = "allocation"
	// HoldOpen keeps the driver open as long as its client is connected, and reports progress when it does. HandOver
	// ends all but the plugin: the answer arrives when the client may write the node's files. The plugin ends with
	// HoldOpen. Only another instance of the program sends these.
	HoldOpen Act = "hold-open"
	HandOver Act = "hand-over"
)

// acts says, for each act, what its requests must have and may have.
var acts = map[Act]struct{ device, reason, options, container, driver, holder bool }{
	Cordon:     {device: true, reason: true},
	Uncordon:   {device: true},
	Reset:      {device: true, options: true},
	Release:    {},
	Reopen:     {},
	Claims:     {},
	Forget:     {holder: true},
	Allocation: {container: true},
	HoldOpen:   {},
	HandOver:   {driver: true},
}

// Request is a request of an administrator or of prestart-hook.
type Request struct {
	Act Act `json:"act"`
	// Device is a UUID or an index, such as "3" or "3:0" for a MIG device.
	Device string `json:"device,omitempty"`
	// Reason is one line of text.
	Reason string `json:"reason,omitempty"`
	// Wait says whether to wait until the device is not in use.
	Wait bool `json:"wait,omitempty"`
	// Force says whether to reset the device although processes outside containers use it, or to forget a holder although
	// it may use the device.
	Force bool `json:"force,omitempty"`
	// Holder is POD-UID/CONTAINER/DEVICE or CLAIM-UID/DEVICE.
	Holder string `json:"holder,omitempty"`
	// Namespace, Pod and Container name a container of a pod.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// NoDriver says that the client of HandOver cannot use the driver.
	NoDriver bool `json:"noDriver,omitempty"`
}

// String describes the request for people, such as "cordon 3 (a fan is loud)".
func (r *Request) String() string {
	text := strings.TrimSpace(string(r.Act) + " " + r.Device + r.Holder)
	if r.Container != "" {
		text += " of container " + r.Container + " of pod " + r.Namespace + "/" + r.Pod
	}
	if r.Reason != "" {
		text += " (" + r.Reason + ")"
	}
	if r.Wait {
		text += ", wait"
	}
	if r.Force {
		text += ", force"
	}
	return text
}

// The largest texts of a request, in bytes.
const (
	maxDevice = 100
	maxReason = 500
	maxName   = 253 // of a pod
	maxHolder = 500
)

// Check returns an error if the request is invalid.
func (r *Request) Check() error {
	needs, known := acts[r.Act]
	switch {
	case !known:
		return fmt.Errorf("unknown act %q", r.Act)
	case needs.device && r.Device == "":
		return fmt.Errorf("%s: name a device", r.Act)
	case !needs.device && r.Device != "":
		return fmt.Errorf("%s: takes no device", r.Act)
	case needs.reason && r.Reason == "":
		return fmt.Errorf("%s: give a reason", r.Act)
	case !needs.reason && r.Reason != "":
		return fmt.Errorf("%s: takes no reason", r.Act)
	case !needs.options && (r.Wait || r.Force && !needs.holder):
		return fmt.Errorf("%s: takes neither wait nor force", r.Act)
	case !needs.driver && r.NoDriver:
		return fmt.Errorf("%s: takes no noDriver", r.Act)
	case needs.holder != (r.Holder != ""):
		return fmt.Errorf("%s: takes a holder only to forget it", r.Act)
	case needs.container && (r.Namespace == "" || r.Pod == "" || r.Container == ""):
		return fmt.Errorf("%s: name a container, its pod and its namespace", r.Act)
	case !needs.container && r.Namespace+r.Pod+r.Container != "":
		return fmt.Errorf("%s: takes no container", r.Act)
	}
	return errors.Join(checkText("device", r.Device, maxDevice), checkText("reason", r.Reason, maxReason),
		checkText("holder", r.Holder, maxHolder), checkText("namespace", r.Namespace, maxName),
		checkText("pod", r.Pod, maxName),
		checkText("container", r.Container, maxName))
}

func checkText(name, text string, most int) error {
	if len(text) > most {
		return fmt.Errorf("the %s has %d bytes, more than the maximum of %d", name, len(text), most)
	}
	notPrinted := func(c rune) bool { return !unicode.IsPrint(c) }
	if !utf8.ValidString(text) || strings.ContainsFunc(text, notPrinted) || strings.TrimSpace(text) != text {
		return fmt.Errorf("the %s %q is not one line of text", name, text)
	}
	return nil
}

// maxRequest bounds a request, and maxLine a line of an answer, in bytes.
const (
	maxRequest = 16 << 10
	maxLine    = 4 << 20 // a holding of Claims has some 300 bytes, and a node some hundred of them
)

// parseRequest reads a request and returns an error if anything follows it.
func parseRequest(from io.Reader) (Request, error) {
	data, err := io.ReadAll(from)
	if err != nil {
		return Request{}, fmt.Errorf("read the request: %w", err)
	}
	var r Request
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return Request{}, fmt.Errorf("read the request: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Request{}, errors.New("read the request: unexpected data after the request")
	}
	if err := r.Check(); err != nil {
		return Request{}, fmt.Errorf("the request is invalid: %w", err)
	}
	return r, nil
}

// message is a line of an answer. The last line has Result or Error.
type message struct {
	// Progress is a sentence about the work in progress.
	Progress string `json:"progress,omitempty"`
	// Result is a sentence about what was done, or what the act returns.
	Result string `json:"result,omitempty"`
	// Error says why the request was not carried out.
	Error string `json:"error,omitempty"`
}

// Handler carries out requests. Handle may be called by several goroutines at once. Its context ends when the client
// disconnects. Handle returns a sentence about what was done, or what the act returns. While it works, it may pass
// sentences about that to the function `progress`.
type Handler interface {
	Handle(ctx context.Context, r Request, progress func(string)) (result string, err error)
}

// SocketPath returns the path of the socket in a directory.
func SocketPath(dir string) string { return filepath.Join(dir, "control.sock") }
