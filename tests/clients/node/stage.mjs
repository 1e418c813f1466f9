// What the programs of this folder share: how they are told what to do, and how they tell what came of it.

import dns from 'node:dns';
import readline from 'node:readline';
import { inspect } from 'node:util';

// Servers are named by their number: whoever looks up a name is after another machine.
dns.lookup = (name) => {
  throw new Error(`${name}: tests talk to loopback addresses only`);
};

/** Plays a case for each line that comes, and answers with a line. `prepare` makes the cases anew for each. */
export async function play(prepare) {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { chosen, ...stage } = JSON.parse(line);
    let outcome;
    try {
      outcome = { told: await prepare(stage)[chosen]() };
    } catch (error) {
      outcome = { failed: inspect(error) };
    }
    process.stdout.write(`${JSON.stringify(outcome)}\n`);
  }
}

/** All that a stream gives. */
export async function read(stream) {
  const told = [];
  for await (const each of stream) told.push(each);
  return told;
}

/** The error that a call ends in. */
export async function fail(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error('It did not fail.');
}

// A red dot.
export const PIXEL =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==';
