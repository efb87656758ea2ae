package state_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

var kills = flag.Int("kills", 200, "how often a process that changes the state is killed")

// The child of TestKills gets the path of the state and the first number for its pods.
const killEnvironment = "TEST_STATE_KILLS"

func TestMain(m *testing.M) {
	for name, child := range map[string]func(string) error{
		killEnvironment: changeUntilKilled, syncEnvironment: changeWithoutSync,
	} {
		if value, ok := os.LookupEnv(name); ok {
			if err := child(value); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	os.Exit(m.Run())
}

// changeUntilKilled admits and deletes pods in four goroutines, each with a quarter of the devices. It writes a line
// before each change and one after it.
func changeUntilKilled(value string) error {
	var path string
	var round int
	if _, err := fmt.Sscanf(value, "%d %s", &round, &path); err != nil {
		return err
	}
	s, loaded, err := state.Open(path, state.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	errs := make(chan error, 4)
	for number := range 4 {
		w := worker{s: s, number: number, round: round, pods: map[string]string{}}
		for _, p := range loaded.Placements {
			if id := p.Allocations[0].IDs[0]; strings.HasPrefix(id, fmt.Sprintf("GPU-%d-", number)) {
				w.pods[id] = p.Pod.UID
			}
		}
		group.Go(func() { errs <- w.run() })
	}
	group.Wait()
	return <-errs
}

// worker changes the pods of a quarter of the devices.
type worker struct {
	s             *state.Store
	number, round int
	pods          map[string]string // the UIDs by device
}

func (w *worker) run() error {
	for i := 0; ; i++ {
		id := fmt.Sprintf("GPU-%d-%d", w.number, rand.IntN(20)) //nolint:gosec // no secret
		uid, held := w.pods[id]
		if held {
			say("delete", uid, id)
			if err := w.s.Delete(context.Background(), uid); err != nil {
				return err
			}
			delete(w.pods, id)
			say("deleted", uid, id)
			continue
		}
		uid = fmt.Sprintf("%d-%d-%d", w.round, w.number, i)
		say("put", uid, id)
		if err := w.s.Put(context.Background(), onDevice(uid, id)); err != nil {
			return err
		}
		w.pods[id] = uid
		say("done", uid, id)
	}
}

// say writes a line with one system call, so that a kill leaves whole lines.
func say(what, uid, id string) { _, _ = os.Stdout.WriteString(what + " " + uid + " " + id + "\n") }

func onDevice(uid, id string) model.Placement {
	return model.Placement{
		Pod: model.Pod{UID: uid, Name: uid},
		Allocations: []model.Allocation{{
			Container: "main", Resource: "nvidia.com/gpu", IDs: []string{id}, Response: make([]byte, 339),
		}},
	}
}

// TestKills kills a process that changes the state at random moments, while it starts too. Nothing that was
// acknowledged is lost, nothing else is there, and no device is held twice. -args -kills N sets how often.
func TestKills(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	expected := map[string]expectation{} // by UID
	changes, silent := 0, 0
	for round := range *kills {
		lines := killed(t, program, fmt.Sprintf("%d %s", round, path))
		for _, line := range lines {
			what, rest, _ := strings.Cut(line, " ")
			uid, id, _ := strings.Cut(rest, " ")
			expected[uid] = expectation{last: what, device: id}
		}
		changes += len(lines) / 2
		if len(lines) == 0 {
			silent++
		}
		expected = check(t, round, path, expected)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d kills, %d of them during the start, %d changes", *kills, silent, changes)
	if changes < *kills || silent == 0 {
		t.Errorf(
			"%d changes in %d rounds, %d without a change: the kills come at the wrong time",
			changes,
			*kills,
			silent,
		)
	}
}

// killed runs a child until a random moment, and returns its lines.
func killed(t *testing.T, program, environment string) (lines []string) {
	t.Helper()
	cmd := exec.Command(program) //nolint:noctx // it is killed below
	cmd.Env = append(os.Environ(), killEnvironment+"="+environment)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	// Half of the kills come at some time after the start, half after some number of lines.
	wait, limit := time.Duration(rand.IntN(30))*time.Millisecond, -1 //nolint:gosec // no secret
	if rand.IntN(2) == 0 {                                           //nolint:gosec // no secret
		wait, limit = 10*time.Second, 1+rand.IntN(100) //nolint:gosec // no secret
	}
	timer := time.AfterFunc(wait, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	for scanner := bufio.NewScanner(out); scanner.Scan(); {
		lines = append(lines, scanner.Text())
		if len(lines) == limit {
			_ = cmd.Process.Kill()
		}
	}
	if err := cmd.Wait(); cmd.ProcessState.Exited() {
		t.Fatalf("the child ended by itself: %v", err)
	}
	return lines
}

// expectation is the last line of a pod.
type expectation struct{ last, device string }

// check compares the state with what was acknowledged, and returns what is expected of the next round's.
func check(t *testing.T, round int, path string, expected map[string]expectation) map[string]expectation {
	t.Helper()
	s, loaded := open(t, path)
	defer s.Close()
	if loaded.Loss != nil {
		t.Errorf("round %d: %s", round, loaded.Loss.Reason)
	}
	next, holders := map[string]expectation{}, map[string]string{}
	for _, p := range loaded.Placements {
		uid, id := p.Pod.UID, p.Allocations[0].IDs[0]
		e, known := expected[uid]
		if !known || e.device != id || e.last == "deleted" {
			t.Errorf("round %d: %s has %s, expected %+v", round, uid, id, e)
		}
		if holders[id] != "" {
			t.Errorf("round %d: %s and %s have %s", round, uid, holders[id], id)
		}
		holders[id] = uid
		next[uid] = expectation{"done", id}
	}
	for uid, e := range expected {
		if _, there := next[uid]; !there && !slices.Contains([]string{"put", "delete", "deleted"}, e.last) {
			t.Errorf("round %d: %s with %s is lost", round, uid, e.device)
		}
	}
	return next
}
