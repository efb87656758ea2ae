package prepare

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"gpu-cdi-plugin/internal/wording"
)

// Record is the result of a device's preparation.
type Record struct {
	// UUID is the UUID of the device.
	UUID   string `json:"uuid"`
	Policy Policy `json:"policy"`
	// Time is when the preparation began.
	Time     time.Time     `json:"time"`
	Duration time.Duration `json:"duration"` // nanoseconds
	Steps    []Step        `json:"steps"`
	// Error says why the device was refused, or is empty.
	Error string `json:"error,omitempty"`
}

// Step is a step of a preparation: sharing, health, processes, memory, settings, persistence, reset or exec. It is
// "wait" if an earlier preparation or reset of the device has not ended, or if the driver was closed for too long.
type Step struct {
	Name   string `json:"name"`
	Result Result `json:"result"`
	// Note says what was found or done, or why the step was skipped or failed.
	Note string `json:"note,omitempty"`
	// Unable says that a skipped step should have been run and could not be.
	Unable   bool          `json:"unable,omitempty"`
	Duration time.Duration `json:"duration"` // nanoseconds
}

// Result is how a step ended.
type Result string

// The results of a step.
const (
	OK      Result = "ok"
	Failed  Result = "failed"
	Skipped Result = "skipped"
)

// Undone returns the steps that should have been run and could not be, with the reasons.
func (r *Record) Undone() []string {
	var list []string
	for _, s := range r.Steps {
		if s.Unable {
			list = append(list, s.Name+" ("+s.Note+")")
		}
	}
	return list
}

// MaxRecords bounds the records that are read, in bytes.
const MaxRecords = 4 << 20

// ParseRecords parses records as JSON: the last record of each device, by UUID.
func ParseRecords(data []byte) (map[string]Record, error) {
	var all map[string]Record
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("parse the records of preparations: %w", err)
	}
	return all, nil
}

// String says when the device was prepared, by which policy, how long it took and with which result, such as
// "2026-01-02T03:04:05Z check ok 12ms" or "2026-01-02T03:04:05Z check failed (memory) 5s".
func (r *Record) String() string {
	result := string(OK)
	if r.Error != "" {
		result = string(Failed)
		if last := len(r.Steps) - 1; last >= 0 {
			result += " (" + r.Steps[last].Name + ")"
		}
	}
	return fmt.Sprintf("%s %s %s %s",
		r.Time.UTC().Format(time.RFC3339), r.Policy, result, r.Duration.Round(time.Millisecond))
}

// Error says why a device was refused, in one line.
type Error struct {
	// UUID identifies the device, and Step the step that failed.
	UUID, Step string
	Err        error
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s is not ready for a container (%s): %s", e.UUID, e.Step, plain(e.Err.Error()))
}

func (e *Error) Unwrap() error { return e.Err }

// refusal has an error for each device that failed. Its text is one line.
type refusal []error

func (r refusal) Error() string {
	var texts []string
	for _, err := range r {
		texts = append(texts, err.Error())
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns an *[Error] for each device.
func (r refusal) Unwrap() []error { return r }

// recorder makes a Record. When end is called, steps may still be running.
type recorder struct {
	mu     sync.Mutex
	record Record
	ended  bool
	name   string // of the current step
	began  time.Time
}

func newRecorder(uuid string, policy Policy) *recorder {
	now := time.Now()
	return &recorder{
		record: Record{UUID: uuid, Policy: policy, Time: now, Steps: []Step{}}, name: "wait", began: now,
	}
}

func (r *recorder) begin(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.name, r.began = name, time.Now()
}

// add records the result of the current step. If the step failed, add only returns its error, which end records.
func (r *recorder) add(note string, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	why, isSkipped := errors.AsType[skippedError](err)
	switch {
	case errors.Is(err, errNotDue):
	case isSkipped:
		_, isUnable := errors.AsType[unableError](err)
		r.addStep(Step{Result: Skipped, Note: string(why), Unable: isUnable})
	case err != nil:
		return err
	default:
		r.addStep(Step{Result: OK, Note: note})
	}
	return nil
}

// addStep adds the current step, unless the record was returned already.
func (r *recorder) addStep(s Step) {
	if r.ended {
		return
	}
	s.Name, s.Note, s.Duration = r.name, plain(s.Note), time.Since(r.began)
	r.record.Steps = append(r.record.Steps, s)
}

// end returns the record. If there is an error, it is the result of the current step.
func (r *recorder) end(err error) (Record, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { r.ended = true }()
	r.record.Duration = time.Since(r.record.Time)
	if err == nil {
		return r.record, nil
	}
	r.addStep(Step{Result: Failed, Note: err.Error()})
	err = &Error{UUID: r.record.UUID, Step: r.name, Err: err}
	r.record.Error = err.Error()
	return r.record, err
}

// maxText bounds texts from programs and processes, in bytes.
const maxText = 1000

// plain turns a text into one line of limited length, with only printable characters.
func plain(text string) string {
	text = strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(text, "?"))
	return strings.TrimSpace(wording.Shorten(text, maxText))
}

// list formats the first three things of a list.
func list(things []string) string { return wording.ShortenList(things, 3, ", ") }
