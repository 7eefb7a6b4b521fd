package devserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/worker"
	"go.temporal.io/sdk/workflow"
)

const (
	benchTurnsPerRun    = 100
	clockTicksPerSecond = 100 // USER_HZ, the unit of /proc/PID/stat
)

func benchTurn(context.Context, int) error { return nil }

// benchSession takes turns, each one regular activity.
func benchSession(ctx workflow.Context, turns int) error {
	ctx = workflow.WithActivityOptions(ctx, workflow.ActivityOptions{StartToCloseTimeout: time.Minute})
	for turn := range turns {
		if err := workflow.ExecuteActivity(ctx, benchTurn, turn).Get(ctx, nil); err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkTurns measures what one turn, a regular activity that does nothing,
// costs the servers, for one session and for 32 sessions at a time. One
// iteration is one turn: run it with a fixed count, -benchtime 6400x.
func BenchmarkTurns(b *testing.B) {
	for _, sessions := range []int{1, 32} {
		b.Run(fmt.Sprint("sessions=", sessions), func(b *testing.B) { benchmarkTurns(b, sessions) })
	}
}

func benchmarkTurns(b *testing.B, sessions int) {
	servers := startServers(b, Config{DataDir: testDir(b)})
	temporal := dialTemporal(b, servers.TemporalAddress())
	w := worker.New(temporal, testQueue, worker.Options{
		// A task that finds a poller waiting is handed over in memory; one that
		// does not is written to Postgres first.
		MaxConcurrentWorkflowTaskPollers: 32,
		MaxConcurrentActivityTaskPollers: 4, // activities are dispatched eagerly
	})
	w.RegisterWorkflow(benchSession)
	w.RegisterActivity(benchTurn)
	if err := w.Start(); err != nil {
		b.Fatal(err)
	}
	defer w.Stop()
	runTurns(b, temporal, "warm-up", sessions, 2*sessions)

	temporalBefore, postgresBefore, oursBefore := cpuOf(b, servers)
	b.ResetTimer()
	runTurns(b, temporal, "measured", sessions, b.N)
	b.StopTimer()
	temporalAfter, postgresAfter, oursAfter := cpuOf(b, servers)
	perTurn := func(before, after time.Duration) float64 { return (after - before).Seconds() * 1000 / float64(b.N) }
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "turns/s")
	b.ReportMetric(perTurn(temporalBefore, temporalAfter), "temporal-cpu-ms/turn")
	b.ReportMetric(perTurn(postgresBefore, postgresAfter), "postgres-cpu-ms/turn")
	b.ReportMetric(perTurn(oursBefore, oursAfter), "worker-cpu-ms/turn")
	b.ReportMetric(residentMiB(b, servers.temporal.child.pid), "temporal-MiB")
}

// runTurns spreads the turns over runs of at most 100 turns, so many at a time.
func runTurns(b *testing.B, temporal client.Client, prefix string, sessions, turns int) {
	var next atomic.Int64
	var running sync.WaitGroup
	perSession := min(benchTurnsPerRun, (turns+sessions-1)/sessions)
	for range sessions {
		running.Go(func() {
			for {
				number := int(next.Add(1)) - 1
				mine := min(perSession, turns-number*perSession)
				if mine <= 0 {
					return
				}
				options := client.StartWorkflowOptions{ID: fmt.Sprintf("%s-%d", prefix, number), TaskQueue: testQueue}
				run, err := temporal.ExecuteWorkflow(b.Context(), options, benchSession, mine)
				if err == nil {
					err = run.Get(b.Context(), nil)
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	running.Wait()
}

// BenchmarkStart measures the way from nothing, or from an idle machine with
// existing data, to the first finished workflow.
func BenchmarkStart(b *testing.B) {
	for _, existing := range []bool{false, true} {
		b.Run(fmt.Sprint("existing-data=", existing), func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				config := Config{DataDir: testDir(b)}
				if existing {
					if err := startServers(b, config).Stop(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				servers := startServers(b, config)
				temporal := dialTemporal(b, servers.TemporalAddress())
				startWorker(b, temporal)
				startWaiting(b, temporal, "first")
				finishWaiting(b, temporal, "first", "done")
				b.StopTimer()
				if err := servers.Stop(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// BenchmarkIdle measures what the servers cost while nothing happens. One
// iteration is one second: -benchtime 30x.
func BenchmarkIdle(b *testing.B) {
	servers := startServers(b, Config{DataDir: testDir(b)})
	b.ResetTimer()
	temporalBefore, postgresBefore, _ := cpuOf(b, servers)
	<-time.After(time.Duration(b.N) * time.Second)
	temporalAfter, postgresAfter, _ := cpuOf(b, servers)
	perSecond := func(before, after time.Duration) float64 { return (after - before).Seconds() * 1000 / float64(b.N) }
	b.ReportMetric(perSecond(temporalBefore, temporalAfter), "temporal-cpu-ms/s")
	b.ReportMetric(perSecond(postgresBefore, postgresAfter), "postgres-cpu-ms/s")
	b.ReportMetric(residentMiB(b, servers.temporal.child.pid), "temporal-MiB")
	b.ReportMetric(float64(len(postgresIn(servers.PostgresDataDir()))), "postgres-processes")
	b.ReportMetric(proportionalMiB(b, postgresIn(servers.PostgresDataDir())), "postgres-MiB")
}

// cpuOf returns the CPU time spent so far by Temporal, by all processes of
// Postgres, and by ourselves, who are the worker.
func cpuOf(b *testing.B, servers *Servers) (temporal, postgres, ours time.Duration) {
	temporal, _ = cpuTimes(b, servers.temporal.child.pid)
	for _, pid := range postgresIn(servers.PostgresDataDir()) {
		own, ended := cpuTimes(b, pid)
		postgres += own + ended
	}
	ours, _ = cpuTimes(b, os.Getpid())
	return temporal, postgres, ours
}

// cpuTimes returns the CPU time of a process and of its ended children.
func cpuTimes(b *testing.B, pid int) (own, ended time.Duration) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, afterName, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(afterName) // begins with field 3 of proc(5)
	ticks := func(field int) time.Duration {
		value, err := strconv.ParseInt(fields[field-3], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		return time.Duration(value) * time.Second / clockTicksPerSecond
	}
	return ticks(14) + ticks(15), ticks(16) + ticks(17)
}

func residentMiB(b *testing.B, pid int) float64 {
	return memoryKiB(b, filepath.Join("/proc", strconv.Itoa(pid), "status"), "VmRSS:") / 1024
}

// proportionalMiB counts what the processes share once.
func proportionalMiB(b *testing.B, pids []int) float64 {
	sum := 0.0
	for _, pid := range pids {
		sum += memoryKiB(b, filepath.Join("/proc", strconv.Itoa(pid), "smaps_rollup"), "Pss:")
	}
	return sum / 1024
}

func memoryKiB(b *testing.B, path, field string) float64 {
	text, err := os.ReadFile(path)
	if err != nil {
		b.Fatal(err)
	}
	_, after, found := strings.Cut(string(text), field)
	words := strings.Fields(after)
	if !found || len(words) == 0 {
		b.Fatalf("%s has no %s", path, field)
	}
	value, err := strconv.ParseFloat(words[0], 64)
	if err != nil {
		b.Fatal(err)
	}
	return value
}
