package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The command in the warning is for the manager that was asked.
func TestTheWarningOfAnInterruptedAdmit(t *testing.T) {
	a, log := newApp(), &testenv.Log{}
	a.Log = slog.New(slog.NewTextHandler(log, nil))
	cmd, _, err := a.rootCommand().Find([]string{"admit"})
	testenv.Must(t, err, cmd.ParseFlags([]string{"--api-socket=/run/x.sock", "--config=/etc/x.yaml"}))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cmd.SetContext(ctx)
	_ = a.stillPlaced(cmd, api.Pod{Metadata: api.Metadata{UID: "uid"}}, ctx.Err())
	want := "device-manager --api-socket=/run/x.sock --config=/etc/x.yaml release uid"
	if !strings.Contains(log.String(), want) {
		t.Errorf("want %s, got %s", want, log)
	}
}
