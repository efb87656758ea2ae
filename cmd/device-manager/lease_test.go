package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What is wrong with a command is known before anyone waits for devices.
func TestFindCommand(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		command string
		want    cli.Code
	}{
		"a program":                        {"true", cli.OK},
		"an engine with options":           {"sh run {podman} image", cli.OK},
		"a placeholder for CDI names":      {"sh -c {cdi}", cli.OK},
		"a program that is not there":      {"no-such-program", noCommand},
		"a path that is not there":         {"/no/such/program", noCommand},
		"a file that is no program":        {"/dev/null", noExecution},
		"a container that starts later":    {"podman create image", noLease},
		"a runtime without a container":    {"runc list", noLease},
		"a placeholder inside an argument": {"sh -c x{podman}", noLease},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			program, _, err := findCommand(strings.Fields(c.command))
			if got := newApp().Classify(err); (err == nil) != (program != "") || cli.CodeOf(got) != c.want {
				t.Errorf("%q, error %v; want the status %d", program, err, c.want)
			}
		})
	}
}

// A user who makes a mistake is told how gpu-run is called.
func TestHowLeaseProgramsAreCalled(t *testing.T) {
	t.Parallel()
	const usage = "gpu-run [flags] N [--] COMMAND [ARG...]"
	for name, c := range map[string]struct {
		program clitest.Run
		args    string
		want    string // in the error
	}{
		"no argument":                {runAsLeaseProgram, "", "usage: " + usage},
		"a number and no command":    {runAsLeaseProgram, "1", "there is no command to run"},
		"no number":                  {runAsLeaseProgram, "true", `"true" is no number of devices; usage: ` + usage},
		"a flag behind the number":   {runAsLeaseProgram, "1 --wait 0 -- true", "--wait: flags come before the number; "},
		"a short flag behind it":     {runAsLeaseProgram, "1 -q true", "-q: flags come before the number; "},
		"the number twice":           {runAsLeaseProgram, "--gpus 1 2 -- x", "is given twice: --gpus 1 and 2"},
		"run with the number behind": {run, "run --gpus 1 2 -- x", `"2" is no command: the number of devices is`},
		"run without a number":       {run, "run -- x", "--gpus: want the number of devices"},
		"0 devices":                  {runAsLeaseProgram, "0 -- true", `"0" is no number of devices`},
		"more than any host has":     {runAsLeaseProgram, "99999999999999999999 true", "is no number of devices"},
		"a negative time":            {runAsLeaseProgram, "--wait -1s 1 true", "--wait: want a time such as 10m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := c.program.Result(strings.Fields(c.args)...)
			if code != int(cli.Usage) || stdout != "" || !strings.Contains(stderr, c.want) {
				t.Errorf("exit status %d, stdout %q, stderr %q; want %q", code, stdout, stderr, c.want)
			}
		})
	}
	_, _, stderr := clitest.Run(runAsLeaseProgram).Result("1")
	if !strings.HasSuffix(stderr, "\nhint: see gpu-run --help\n") {
		t.Errorf("the hint is: %s", stderr)
	}
	code, stdout, _ := clitest.Run(runAsLeaseProgram).Result("--version")
	if code != 0 || !strings.HasPrefix(stdout, "gpu-run version ") {
		t.Errorf("--version: %d, %q", code, stdout)
	}
}

func TestCompletionOfLeaseProgram(t *testing.T) {
	_, stdout, _ := clitest.Run(runAsLeaseProgram).Result("__complete", "--mo")
	if !strings.HasPrefix(stdout, "--model") {
		t.Errorf("--mo is completed by %q", stdout)
	}
}

func TestHelpOfLeaseProgramIsWhatItWas(t *testing.T) {
	_, got, _ := clitest.Run(runAsLeaseProgram).Result("--help")
	clitest.Golden(t, "testdata/help/gpu-run-help.txt", got, *update)
}

// serveLeases answers the requests for leases one after the other, and all later ones like the last. It returns an app
// that asks it.
func serveLeases(t *testing.T, answers ...http.HandlerFunc) (*app, *bytes.Buffer) {
	t.Helper()
	a, out := newApp(), &bytes.Buffer{}
	a.APISocket, a.Stderr, a.Stdout = filepath.Join(t.TempDir(), "api.sock"), out, out
	listener, err := net.Listen("unix", a.LeaseSocket())
	testenv.Must(t, err)
	var next atomic.Int64
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answers[min(int(next.Add(1)), len(answers))-1](w, r)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return a, out
}

// Who may use the API's own socket asks for leases there: other users cannot fill its queue.
func TestLeasesAreAskedForAtTheSocketOfTheAPI(t *testing.T) {
	a, out := serveLeases(t, func(http.ResponseWriter, *http.Request) { t.Error("the socket for leases is used") })
	listener, err := net.Listen("unix", a.APISocket)
	testenv.Must(t, err)
	server := &http.Server{Handler: lists(lease.Lease{ID: "abc"})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	testenv.Must(t, a.leases(t.Context(), cli.Output{Format: "name"}, false))
	if got := out.String(); !strings.Contains(got, "abc") {
		t.Errorf("the leases: %q", got)
	}
}

// event sends a line of the answer to a request for a lease.
func event(w http.ResponseWriter, e api.LeaseEvent) {
	_ = json.NewEncoder(w).Encode(e)
	_ = http.NewResponseController(w).Flush()
}

func waits(w http.ResponseWriter) {
	event(w, api.LeaseEvent{Waiting: &lease.Waiting{Request: "1 device", Position: 3, Reason: "none is free"}})
}

func ends(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

func unavailable(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusServiceUnavailable)
	_ = json.NewEncoder(w).Encode(api.Error{Text: "the device manager ends"})
}

func grants(w http.ResponseWriter, _ *http.Request) {
	event(w, api.LeaseEvent{Granted: &lease.Granted{ID: "abc"}})
}

func lists(items ...lease.Lease) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.LeaseList{Items: items})
	}
}

// A caller who waits while the package of the manager is upgraded gets his devices from the next manager.
func TestACallerOutlivesTheManager(t *testing.T) {
	t.Parallel()
	waitsAndEnds := func(w http.ResponseWriter, r *http.Request) { waits(w); ends(w, r) }
	mine := lease.Lease{ID: "mine", UID: os.Geteuid(), PID: os.Getpid(), Since: time.Now().Add(time.Hour)}
	timed, other, early := mine, mine, mine
	timed.PID, other.PID, early.Since = 0, 1, time.Now().Add(-time.Hour)
	for name, c := range map[string]struct {
		answers []http.HandlerFunc
		request api.LeaseRequest
		wait    waitTime
		want    cli.Code
		says    string
	}{
		"it ends while the caller waits": {
			answers: []http.HandlerFunc{waitsAndEnds, ends, unavailable, lists(other, timed, early), grants}, wait: forever,
			says: "verb waits for 1 device: place 3 in the queue, none is free\n" +
				"verb asks again for up to 30s, at the end of the queue: wait for a lease: ",
		},
		"it says that it ends": {
			answers: []http.HandlerFunc{unavailable, lists(), grants}, wait: forever,
			says: "verb asks again for up to 30s, at the end of the queue: the device manager ends\n",
		},
		"the time to wait ends meanwhile": {
			answers: []http.HandlerFunc{waitsAndEnds, unavailable}, wait: waitTime(300 * time.Millisecond), want: waitEnded,
			says: "asks again",
		},
		"a caller who does not wait": {answers: []http.HandlerFunc{unavailable}, want: noLease},
		"a refusal": {
			answers: []http.HandlerFunc{waitsAndEnds, lists(), func(w http.ResponseWriter, _ *http.Request) {
				event(w, api.LeaseEvent{Error: &api.Error{Text: "no", Code: http.StatusUnprocessableEntity}})
			}}, wait: forever, want: noLease, says: "asks again",
		},
		"the devices were given when it ended": {
			answers: []http.HandlerFunc{waitsAndEnds, lists(mine), grants}, wait: forever, want: noLease, says: "asks again",
		},
		"a lease for a time began when it ended": {
			answers: []http.HandlerFunc{waitsAndEnds, lists(timed), grants}, request: api.LeaseRequest{Timed: true},
			wait: forever, want: noLease, says: "asks again",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, out := serveLeases(t, c.answers...)
			cmd := a.leasing(a.leaseCreateCommand())
			cmd.Use = "verb"
			got, err := a.acquire(t.Context(), leaseOptions{cmd: cmd, wait: c.wait}, c.request)
			if code := cli.CodeOf(err); code != c.want || (err == nil) != (got.ID == "abc") {
				t.Errorf("%+v, %v with the status %d, want %d", got, err, code, c.want)
			}
			if !strings.Contains(out.String(), c.says) || (c.says == "") != (out.Len() == 0) {
				t.Errorf("says %q, want %q", out, c.says)
			}
		})
	}
}

// fakeManager ends at once, and answers again after a time, or never if that is 0.
type fakeManager struct {
	begin time.Time
	after time.Duration
	// ends are how often a request waits and loses its place, while managers answer.
	ends int
}

func (m *fakeManager) away() error {
	if since := time.Since(m.begin); m.after == 0 || since < m.after {
		return fmt.Errorf("%w x", api.ErrNoManager)
	}
	return nil
}

func (m *fakeManager) Leases(context.Context) (api.LeaseList, error) {
	return api.LeaseList{}, m.away()
}

func (m *fakeManager) Lease(_ context.Context, _ api.LeaseRequest, waits func(lease.Waiting)) (lease.Granted, error) {
	if m.begin.IsZero() {
		m.begin = time.Now()
		return lease.Granted{}, unixsocket.ErrEnded
	}
	if err := m.away(); err != nil {
		return lease.Granted{}, err
	}
	if m.ends > 0 {
		m.ends--
		m.begin = time.Now()
		waits(lease.Waiting{})
		return lease.Granted{}, unixsocket.ErrEnded
	}
	return lease.Granted{ID: "abc"}, nil
}

// A request waits for each next manager, but not for ever.
func TestACallerWaitsForTheNextManager(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		manager fakeManager
		want    error
		took    time.Duration
		lost    int
	}{
		"none comes": {manager: fakeManager{}, want: api.ErrNoManager, took: restartTime, lost: 1},
		"one comes":  {manager: fakeManager{after: 29 * time.Second}, took: 29 * time.Second, lost: 1},
		"one comes too late": {
			manager: fakeManager{after: 31 * time.Second}, want: api.ErrNoManager, took: restartTime, lost: 1,
		},
		"three, one by one":     {manager: fakeManager{after: 20 * time.Second, ends: 2}, took: time.Minute, lost: 3},
		"another one ends late": {manager: fakeManager{after: 29 * time.Second, ends: 1}, took: 58 * time.Second, lost: 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				lost, begin := 0, time.Now()
				r := asking{
					client: &c.manager, begin: begin, waits: func(lease.Waiting) {}, lost: func(error) { lost++ },
				}
				got, err := r.ask(t.Context())
				if !errors.Is(err, c.want) || (err == nil) != (got.ID == "abc") {
					t.Errorf("got %+v, %v", got, err)
				}
				if took := time.Since(begin); took < c.took || took > c.took+time.Second || lost != c.lost {
					t.Errorf("it took %v and the place was lost %d times, want %v and %d", took, lost, c.took, c.lost)
				}
			})
		})
	}
}

// Without a manager from the beginning nobody waits for one.
func TestNoManager(t *testing.T) {
	t.Parallel()
	a := newApp()
	a.APISocket, a.Stderr = filepath.Join(t.TempDir(), "api.sock"), &bytes.Buffer{}
	_, err := a.acquire(t.Context(), leaseOptions{cmd: a.leaseCreateCommand(), wait: forever}, api.LeaseRequest{})
	if cli.CodeOf(err) != noLease || !strings.Contains(cli.HintOf(err), "systemctl start device-manager-leases.socket") {
		t.Errorf("%v, hint %q", err, cli.HintOf(err))
	}
}

// Each error says what can be done about a lease, and nothing about pods.
func TestHintsForLeases(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]string{
		http.StatusNotFound:            "device-manager leases lists the leases",
		http.StatusForbidden:           "--api-group",
		http.StatusUnprocessableEntity: "ask for devices that it has",
		http.StatusTooManyRequests:     "shows who waits",
		http.StatusBadRequest:          "",
	} {
		err := fmt.Errorf("end: %w", &api.Error{Text: "x", Code: code})
		if got := cli.HintOf(cli.Classify(err, leaseErrors)); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("%d: %q, want %q", code, got, want)
		}
	}
	if got := cli.HintOf(cli.Classify(api.ErrNotAllowed, leaseErrors)); !strings.Contains(got, "--lease-group") {
		t.Errorf("not allowed: %q", got)
	}
}

func TestLeasesView(t *testing.T) {
	t.Parallel()
	now := time.Now()
	used := strings.Repeat("GPU-1 is used ", 80)
	view := leasesView(api.LeaseList{
		Items: []lease.Lease{
			{ID: "abc", User: "ada", Devices: []string{"GPU-9"}, Resource: "gpu", Since: now, Command: "lease create"},
			{
				ID: "def", User: "bob", PID: 7, Devices: []string{"a", "b"}, Indexes: []string{"3", "5"},
				Models: []string{"H100"}, Since: now, Command: "x",
			},
		},
		Busy: []lease.Busy{
			{Device: "GPU-1", Reason: used, At: now.Add(-time.Minute)},
			{Device: "GPU-2", Reason: "cordoned", At: now},
			{Device: "GPU-3", Reason: used, At: now.Add(-2 * time.Minute)},
		},
	}, now)
	reason := view.Table.Rows[2][6]
	want := [][]string{
		{"abc", "ada", "-", "1 x gpu", "0s", "-", "lease create", "GPU-9"},
		{"def", "bob", "7", "2 x H100 (3,5)", "0s", "-", "x", "a,b"},
		{"left out", "-", "-", "2 devices", "1m0s", "-", reason, "GPU-1,GPU-3"},
		{"left out", "-", "-", "GPU-2", "0s", "-", "cordoned", "GPU-2"},
	}
	if diff := cmp.Diff(want, view.Table.Rows); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.HasPrefix(reason, "GPU-1 is used GPU-1") || len(reason) > maxReason {
		t.Errorf("the reason is %q", reason)
	}
}

// A watch prints a table when the leases have changed, behind an empty line.
func TestWatchLeases(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	ends := time.Now().Add(time.Hour)
	later := ends.Add(time.Second) // the same, by other clocks
	one, same := lease.Lease{ID: "one", Ends: &ends}, lease.Lease{ID: "one", Ends: &later}
	a, out := serveLeases(t, lists(one), lists(same), lists(), func(w http.ResponseWriter, r *http.Request) {
		lists()(w, r)
		cancel()
	})
	if err := a.leases(ctx, cli.Output{Format: "table"}, true); err != nil {
		t.Errorf("its end by a signal: %v", err)
	}
	got := strings.Split(out.String(), "\n")
	if len(got) != 5 || !strings.HasPrefix(got[1], "one ") || got[2] != "" || got[3] != "nothing to list" {
		t.Errorf("it prints:\n%s", out)
	}
}
