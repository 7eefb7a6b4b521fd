package migrations_test

import (
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"holdfast/migrations"
	"holdfast/store/storetest"
)

func TestMain(m *testing.M) { os.Exit(storetest.Main(m)) }

// schemaSQL describes everything in the schema but goose's own table.
const schemaSQL = `
select table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable || ' ' || coalesce(column_default, '') || ' ' || coalesce(generation_expression, '')
from information_schema.columns where table_schema = 'public' and table_name <> 'goose_db_version'
union all
select c.relname || ' ' || con.conname || ' ' || pg_get_constraintdef(con.oid)
from pg_constraint con join pg_class c on c.oid = con.conrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'public' and c.relname <> 'goose_db_version'
union all
select indexdef from pg_indexes where schemaname = 'public' and tablename <> 'goose_db_version'
union all
select relname || ' ' || coalesce(reloptions::text, '') from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'public' and relkind in ('r', 'S') and relname not like 'goose_db_version%'
union all
select a.attrelid::regclass || '.' || a.attname || ' ' || a.attstorage::text from pg_attribute a join pg_class c on c.oid = a.attrelid
join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'public' and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped and c.relname <> 'goose_db_version'
order by 1`

func schema(t *testing.T, url string) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	rows, err := conn.Query(t.Context(), schemaSQL)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func applied(t *testing.T, url string) (n, all int) {
	t.Helper()
	steps, err := migrations.Status(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range steps {
		if step.Version != int64(i+1) || step.Applied == step.AppliedAt.IsZero() {
			t.Errorf("step %d is %+v", i+1, step)
		}
		if step.Applied {
			n++
		}
	}
	return n, len(steps)
}

// TestEachStepGoesUpAndDownAndUpAgain: Down of a step leaves exactly what was
// there before it, so that the way up again ends at the same schema.
func TestEachStepGoesUpAndDownAndUpAgain(t *testing.T) {
	url := storetest.EmptyURL(t)
	ctx := t.Context()
	if n, all := applied(t, url); n != 0 || all < 3 {
		t.Fatalf("%d of %d steps are applied to an empty database", n, all)
	}
	if err := migrations.Up(ctx, url); err != nil {
		t.Fatal(err)
	}
	n, all := applied(t, url)
	if n != all {
		t.Fatalf("%d of %d steps are applied", n, all)
	}
	top := schema(t, url)
	for left := all - 1; left >= 0; left-- {
		if err := migrations.Down(ctx, url); err != nil {
			t.Fatal(err)
		}
		if n, _ := applied(t, url); n != left {
			t.Fatalf("after a step down %d are applied, want %d", n, left)
		}
		lower := schema(t, url)
		if err := migrations.Up(ctx, url); err != nil {
			t.Fatal(err)
		}
		if again := schema(t, url); !slices.Equal(again, top) {
			t.Fatalf("up again from %d steps the schema differs:\n%v\n%v", left, again, top)
		}
		for range all - left {
			if err := migrations.Down(ctx, url); err != nil {
				t.Fatal(err)
			}
		}
		if again := schema(t, url); !slices.Equal(again, lower) {
			t.Fatalf("down again to %d steps the schema differs:\n%v\n%v", left, again, lower)
		}
	}
	if rest := schema(t, url); len(rest) != 0 {
		t.Errorf("all steps down leave %v", rest)
	}
	if err := migrations.Down(ctx, url); err == nil {
		t.Error("a step below the first went down")
	}
}

func TestProcessesThatStartTogetherMayAllMigrate(t *testing.T) {
	url := storetest.EmptyURL(t)
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			if err := migrations.Up(t.Context(), url); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if n, all := applied(t, url); n != all {
		t.Errorf("%d of %d steps are applied", n, all)
	}
}

func TestUnreachableDatabaseIsAnError(t *testing.T) {
	if err := migrations.Up(t.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=5"); err == nil {
		t.Error("an unreachable database was migrated")
	}
}
